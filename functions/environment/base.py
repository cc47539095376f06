"""What an environment is, and what it says of one turn.

    class Calculator:                                         one's own: `file.py:Calculator`
        def reset(self, ground_truth, **rest): ...            columns of the data set's row, by name (or `row`: all)
        def add(self, a: int, b: int) -> int: ...             every other public method is a tool (TRL's environments)
        def get_reward(self) -> float: ...                    of the episode; `text` if it wants the last turn's

    class Game:                                               or, without tools, what a turn's text does
        def reset(self, row): ...
        def step(self, text): return observation, reward, done      or the observation; None: it is over

    class Agent:                                              or a harness that asks for its turns itself (harness.py)
        def reset(self, row): ...
        def run(self, base_url): ...                          whatever speaks OpenAI's API: it makes the prompt, too

Optional: `turn_reward()` after each turn's tools; `done`, true when the episode is over; `parse(text)` to a list of
{"name", "arguments"} where the model writes its calls otherwise than parse.py reads them; `state()` and
`restore(state)`, JSON, where what a turn did must not be done again to come to the next one; `stateless = True` where
answers do not depend on earlier ones; `close()`. Any of them may be `async def`.
"""

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from functions.base.wire import Json

RESERVED = frozenset(
    ("reset", "step", "run", "get_reward", "turn_reward", "parse", "state", "restore", "stateless", "done", "close")
)
"""Of an environment: its other public methods are tools."""


class EnvironmentFailed(Exception):
    """The environment, not the policy, did something that it must not. The message is one line."""


@dataclass(frozen=True)
class Said:
    """A turn of the policy."""

    text: str
    """Without the token that ended it."""
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    before: Sequence[int] = ()
    """All tokens of the episode before it, the prompt's included."""
    cut_off: bool = False
    """The policy did not end it: nobody acts on it."""


@dataclass(frozen=True)
class Answer:
    """What an environment made of one turn; JSON, recorded once for all attempts (episode.py)."""

    observations: Sequence[tuple[str, str]] = ()
    """(tool's name or "", text) of each message that follows; none: the episode is over."""
    reward: float | None = None
    """Of this turn."""
    done: bool = False
    """The environment says so: whatever it said is not read any more."""
    calls: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Of its tool calls, by what was wrong: not_json, unknown_tool, wrong_arguments, raised."""
    state: Any = None
    """Of an environment with `state()`: what `restore` takes."""
    seconds: float = 0.0
    failed: str | None = None
    """Why there is no answer: one line."""
    asked: Json | None = None
    """Of a harness: what its request adds, {"messages"}, {"tokens"}, or, of its first, {"messages", "tools"}."""

    def to_json(self) -> Json:
        values = {name: value for name, value in vars(self).items() if name != "asked" or value is not None}
        return values | {"observations": [list(o) for o in self.observations], "errors": dict(self.errors)}

    @classmethod
    def from_json(cls, value: Json) -> Self:
        return cls(**{**value, "observations": [(str(name), str(text)) for name, text in value["observations"]]})


def finite(value: Any, who: str) -> float:
    """A reward. Raises EnvironmentFailed."""
    if value is None or isinstance(value, str | bytes):
        raise EnvironmentFailed(f"{who} returned {value!r:.80}; wants a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFailed(f"{who} returned {type(value).__name__}; wants a number") from None
    if not math.isfinite(number):
        raise EnvironmentFailed(f"{who} returned {number}; wants a finite number")
    return number


def text_of(value: Any, who: str) -> str:
    """What a tool returned, as the model reads it: text as it is, anything else as JSON. Raises EnvironmentFailed."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise EnvironmentFailed(f"{who} returned {value!r:.80}; wants text or what has a JSON form") from None


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a method, `async def` or not."""
    value = function(*args, **kwargs)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


class Unrestored:
    """What an episode (kinds.py) says that keeps no state, and is worth what its turns were."""

    stateless = False
    restores = False

    def reward(self, said: Said) -> float | None:
        return None

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        """There is none."""
