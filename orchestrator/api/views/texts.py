"""Samples of a step, filtered, sorted and paged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.api.views.tail import Tails

SortKey = Literal[
    "index", "score", "-score", "tokens", "-tokens", "version", "-version", "mismatch", "-mismatch"
]  # fmt: skip
Sample = dict[str, Any]


@dataclass(frozen=True)
class Filter:
    contains: str | None = None
    """In the prompt or the response, whatever the case."""
    min_score: float | None = None
    max_score: float | None = None
    group: int | None = None
    finish: str | None = None

    def __call__(self, sample: Sample) -> bool:
        if self.contains:
            word = self.contains.casefold()
            if word not in sample["prompt"].casefold() and word not in sample["response"].casefold():
                return False
        score = sample.get("score")
        if self.min_score is not None and (score is None or score < self.min_score):
            return False
        if self.max_score is not None and (score is None or score > self.max_score):
            return False
        if self.group is not None and sample["group"] != self.group:
            return False
        return self.finish is None or sample.get("finish") == self.finish


def kept_steps(directory: Path) -> list[int]:
    """The steps that have samples, in order."""
    return sorted(int(path.stem) for path in directory.glob("[0-9]*.jsonl"))


def read_samples(tails: Tails, directory: Path, step: int) -> list[Sample]:
    """Of one of the steps that have some. Raises RunError for a file that cannot be read."""
    return tails.read(directory / f"{step:06d}.jsonl")


def chosen(samples: Iterable[Sample], wanted: Filter, sort: SortKey) -> list[Sample]:
    """Those that are wanted, in the order asked for; samples that lack the number come last."""
    found = [sample for sample in samples if wanted(sample)]
    if sort == "index":
        return found
    key, sign = sort.lstrip("-"), -1.0 if sort.startswith("-") else 1.0

    def place(sample: Sample) -> tuple[bool, float]:
        value = sample.get(key)
        return value is None, 0.0 if value is None else sign * float(value)

    order: Callable[[Sample], tuple[bool, float]] = place
    return sorted(found, key=order)
