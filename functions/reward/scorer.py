"""What every scorer takes and gives back. A failure is data, never a score: whoever asked decides what it means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from functions.base.rows import TRUTH_FIELDS, ground_truths
from functions.call.function import FatalError


@dataclass(frozen=True)
class Item:
    """One finished sample, as scorers see it."""

    group: int
    index: int
    prompt: str
    """With its special tokens."""
    response: str
    """Without special tokens."""
    text: str
    """Prompt and response, with special tokens."""
    row: Mapping[str, Any]
    """The data set's row that the prompt came from."""
    prompt_tokens: npt.NDArray[np.int32]
    response_tokens: npt.NDArray[np.int32]

    @property
    def name(self) -> str:
        return f"sample (group {self.group}, index {self.index})"


@dataclass(frozen=True)
class Scored:
    """A sample's score and whatever other numbers the scorer gave (`numbers["score"]` is the score)."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    pred: str | None = None
    """The answer that it found in the response, as text (verl's name): what a majority is counted over."""


@dataclass(frozen=True)
class Failed:
    """Why a sample has no score: one line that names the scorer, the sample and the place."""

    message: str
    retryable: bool = False
    """What failed is not the scorer: the call may succeed when it is repeated."""


class Scorer(Protocol):
    def score(self, items: Sequence[Item]) -> list[Scored | Failed]:
        """One result for each item, in order.

        Raises FatalError for what is wrong with the scorer itself, RetryableError when a service is away.
        """


@dataclass(frozen=True)
class Several:
    """Scorers by name: of each its score under its name, and what else it gives and none before it has given."""

    scorers: Mapping[str, Scorer]

    def score(self, items: Sequence[Item]) -> list[Scored | Failed]:
        results = [scorer.score(items) for scorer in self.scorers.values()]
        return [self._together(of_item) for of_item in zip(*results, strict=True)]

    def _together(self, results: Sequence[Scored | Failed]) -> Scored | Failed:
        numbers, preds = dict[str, float](), list[str | None]()
        for name, result in zip(self.scorers, results, strict=True):
            if isinstance(result, Failed):
                return result
            others = {key: value for key, value in result.numbers.items() if key != "score"}
            numbers = others | numbers | {name: result.numbers["score"]}
            preds.append(result.pred)
        return Scored(numbers, next(filter(None, preds), None))


LARGEST = float(np.finfo(np.float32).max)
"""Scores travel as float32."""


def ground_truth(row: Mapping[str, Any]) -> Any:
    """The right answer in a row. Raises FatalError naming the fields that there are."""
    for truth in ground_truths(row):
        return truth
    wanted = ", ".join(("reward_model.ground_truth", *TRUTH_FIELDS))
    raise FatalError(f"a rule needs the right answer in a field of the row ({wanted}); it has {', '.join(row)}")


def checked(value: Any, who: str, item: Item) -> Scored | Failed:
    """What a scorer returned for one sample: a number, or a dict with "score" and other values.

    Other values that are no numbers are left out. A score that is missing, None, no number or not finite is a failure.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            return Failed(f'{who} returned a dict without "score" for {item.name}: it has {sorted(map(str, value))}')
        numbers = {"score": _number(value["score"])}
        numbers |= {str(k): n for k, v in value.items() if k != "score" and (n := _number(v)) is not None}
    else:
        numbers = {"score": _number(value)}
        value = {"score": value}
    for name, number in numbers.items():
        if number is None:
            return Failed(f"{who} returned {value[name]!r:.80} for {item.name}; wants a number")
        if not abs(number) <= LARGEST:
            what = "" if name == "score" else f" as {name!r}"
            return Failed(f"{who} returned {number}{what} for {item.name}; wants a finite number of float32")
    pred = value.get("pred")
    return Scored({name: n for name, n in numbers.items() if n is not None}, pred if isinstance(pred, str) else None)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
