"""A user's own class as an environment: with tools (TRL's `environment_factory` classes), with `step`, or with `run`, a
harness of its own (base.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from functions.base.wire import Json
from functions.call import userfile
from functions.call.function import FatalError
from functions.environment.base import RESERVED, Answer, EnvironmentFailed, Said, Unrestored, called, finite, text_of
from functions.environment.harness import HarnessEpisode
from functions.environment.parse import ToolCall, as_call, tool_calls
from functions.environment.schema import schema, wrong

Call = Callable[[ToolCall], str]


class OwnKind:
    """Raises FatalError, in one line, for a class that is no environment."""

    def __init__(self, name: str) -> None:
        made = userfile.load(name)
        if not inspect.isclass(made):
            raise FatalError(f"{name} is {type(made).__name__}, wants a class")
        self.name, self._class = name, made
        if not callable(getattr(made, "reset", None)):
            raise FatalError(f"{name} has no method `reset`")
        methods = [n for n, _ in inspect.getmembers(made, callable) if not n.startswith("_") and n not in RESERVED]
        self.steps, self.asks = (callable(getattr(made, n, None)) for n in ("step", "run"))
        if self.steps == (bool(methods) or self.asks):
            has = f"step and {', '.join(methods) or 'run'}" if self.steps else "neither"
            raise FatalError(
                f"{name} has {has}; an environment has `step`, `run`, or public methods that are its tools"
            )
        try:
            self.tools: Sequence[Json] = (
                [] if self.steps or self.asks else [schema(n, getattr(made, n)) for n in methods]
            )
        except ValueError as error:
            raise FatalError(f"{name}: {error}") from error

    def episode(self) -> OwnEpisode | OwnHarness:
        return (OwnHarness if self.asks else OwnEpisode)(self, called(self._class))


class OwnEpisode:
    def __init__(self, kind: OwnKind, environment: Any) -> None:
        self._kind, self._own = kind, environment
        self.stateless = bool(getattr(environment, "stateless", False))

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        """Raises EnvironmentFailed where `reset` says something: prompts are the data set's."""
        parameters = inspect.signature(self._own.reset).parameters
        values: dict[str, Any] = {k: v for k, v in row.items() if k != "environment"} | {"row": row, "seed": seed}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            values = {name: value for name, value in values.items() if name in parameters}
        else:
            values = {n: v for n, v in values.items() if n in parameters or n not in ("row", "seed")}
        if (said := called(self._own.reset, **values)) is not None:
            raise EnvironmentFailed(
                f"{self._kind.name}.reset returned {said!r:.80}; what it asks stands in the data's prompt"
            )

    def act(self, said: Said | None) -> Answer:
        text = said.text if said is not None else ""
        return self._step(text) if self._kind.steps else self._tools(text)

    def reward(self, said: Said) -> float | None:
        """None: the episode is worth what its turns were."""
        method = getattr(self._own, "get_reward", None)
        if not callable(method):
            return None
        values = {"text": said.text} if "text" in inspect.signature(method).parameters else {}
        return finite(called(method, **values), f"{self._kind.name}.get_reward")

    def state(self) -> Any:
        return called(self._own.state) if self.restores else None

    @property
    def restores(self) -> bool:
        return callable(getattr(self._own, "state", None)) and callable(getattr(self._own, "restore", None))

    def restore(self, state: Any) -> None:
        called(self._own.restore, state)

    def close(self) -> None:
        if callable(getattr(self._own, "close", None)):
            called(self._own.close)

    def _step(self, text: str) -> Answer:
        who = f"{self._kind.name}.step"
        value = called(self._own.step, text)
        told, reward, done = (*value, None, None)[:3] if isinstance(value, tuple) else (value, None, None)
        if told is not None and not isinstance(told, str):
            raise EnvironmentFailed(f"{who} returned {told!r:.80}; wants text, or (text, reward, done)")
        number = None if reward is None else finite(reward, who)
        over = bool(done) or not told
        return Answer([] if over else [("", str(told))], number, done=over)

    def _tools(self, text: str) -> Answer:
        parse = getattr(self._own, "parse", None)
        calls = [as_call(call) for call in called(parse, text) or ()] if callable(parse) else tool_calls(text)
        if not calls:
            return Answer()

        def use(call: ToolCall) -> str:
            return text_of(called(getattr(self._own, call.name), **call.arguments), f"{self._kind.name}.{call.name}")

        answer = use_tools(calls, self._kind.tools, use)
        reward = getattr(self._own, "turn_reward", None)
        number = finite(called(reward), f"{self._kind.name}.turn_reward") if callable(reward) else None
        done = getattr(self._own, "done", False) is True
        return Answer(answer.observations, number, done, answer.calls, answer.errors)


class OwnHarness(HarnessEpisode):
    def __init__(self, kind: OwnKind, environment: Any) -> None:
        self._own = OwnEpisode(kind, environment)
        super().__init__(kind.name, lambda base_url: called(environment.run, base_url), self._own.reward)

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        self._own.begin(row, seed)
        super().begin(row, seed)

    def close(self) -> None:
        super().close()
        self._own.close()


class ToolsEpisode(Unrestored):
    """Of tools that are no class's: what one answers does not depend on the episode's earlier calls."""

    stateless = True

    def __init__(self, tools: Sequence[Json], use: Call) -> None:
        self._tools, self._use = tools, use

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        """Nothing of an episode is the tools'."""

    def act(self, said: Said | None) -> Answer:
        calls = tool_calls(said.text) if said is not None else []
        return use_tools(calls, self._tools, self._use) if calls else Answer()

    def close(self) -> None:
        """What it uses is the replica's."""


def use_tools(calls: Sequence[ToolCall], tools: Sequence[Json], use: Call) -> Answer:
    """One observation for each call, in order. What is wrong with a call, the model reads; so it does what a tool
    raises, for most of it is of the model's making (TRL does the same)."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    observations: list[tuple[str, str]] = []
    errors: dict[str, int] = {}
    for call in calls:
        kind, problem = "not_json", call.problem
        if problem is None and call.name not in schemas:
            kind, problem = "unknown_tool", f"there is no tool {call.name!r}; there are {', '.join(schemas)}"
        if problem is None and (problem := wrong(call.arguments, schemas[call.name])) is not None:
            kind = "wrong_arguments"
        if problem is None:
            try:
                observations.append((call.name, use(call)))
                continue
            except (EnvironmentFailed, FatalError):
                raise
            except Exception as error:
                kind, problem = "raised", f"{type(error).__name__}: {error}"
        observations.append((call.name, f"Error: {' '.join(str(problem).split())}"))
        errors[kind] = errors.get(kind, 0) + 1
    return Answer(observations, calls=len(calls), errors=errors)
