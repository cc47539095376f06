"""Samples of a step, filtered, sorted and paged."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from functions.base.wire import Json
from orchestrator.api.views.tail import Tails
from orchestrator.base.errors import RunError

SortKey = Literal[
    "index", "score", "-score", "advantage", "-advantage", "tokens", "-tokens", "version", "-version", "mismatch",
    "-mismatch",
]  # fmt: skip
Sample = dict[str, Any]
Kind = Literal["training", "validation"]
PREFIX: dict[Kind, str] = {"training": "", "validation": "validation-"}
SEARCHED, SHOWN = 1000, 20
"""Steps that are looked through for a prompt, and those that are shown."""


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


def kept_steps(directory: Path, of: Kind = "training") -> list[int]:
    """The steps that have samples, in order."""
    return sorted(int(path.stem.removeprefix(PREFIX[of])) for path in directory.glob(f"{PREFIX[of]}[0-9]*.jsonl"))


def read_samples(tails: Tails, directory: Path, step: int, of: Kind = "training") -> list[Sample]:
    """Of one of the steps that have some. Raises RunError for a file that cannot be read."""
    return tails.read(directory / f"{PREFIX[of]}{step:06d}.jsonl")


def groups_of(samples: Sequence[Sample]) -> list[Json]:
    """Each prompt's samples that have a score: [{group, count, mean, deviation}], the deviation of a sample (n - 1)."""
    scores: dict[int, list[float]] = {}
    for sample in samples:
        if sample.get("score") is not None:
            scores.setdefault(sample["group"], []).append(float(sample["score"]))
    return [
        {"group": group, "count": len(own), "mean": fmean(own), "deviation": stdev(own) if len(own) > 1 else 0.0}
        for group, own in sorted(scores.items())
    ]


def tools_of(samples: Iterable[Sample]) -> list[Json]:
    """[{tool, calls, failed}] of the samples' conversations, the one that failed most first. What failed, the model
    read as an error (functions/environment/own.py)."""
    told = [turn for sample in samples for turn in sample.get("conversation", ()) if turn["role"] == "tool"]
    names = [turn.get("name") or "(no call that can be read)" for turn in told]
    calls, errors = Counter(names), [str(turn["content"]).startswith("Error: ") for turn in told]
    failed = Counter(name for name, error in zip(names, errors, strict=True) if error)
    ordered = sorted(calls, key=lambda tool: (-failed[tool], tool))
    return [{"tool": tool, "calls": calls[tool], "failed": failed[tool]} for tool in ordered]


def same_prompt(directory: Path, prompt: str, of: Kind) -> list[Json]:
    """[{step, samples}] of the newest steps that have samples of just this prompt, oldest first.

    Files are searched as text; only lines that have it are parsed.
    """
    needle, found = json.dumps(prompt, ensure_ascii=False).encode(), list[Json]()
    for step in kept_steps(directory, of)[: -SEARCHED - 1 : -1]:
        try:
            lines = (directory / f"{PREFIX[of]}{step:06d}.jsonl").read_bytes().splitlines()
        except OSError as error:
            raise RunError(f"{directory}: samples of step {step} cannot be read: {error.strerror}") from error
        samples = [sample for line in lines if needle in line and (sample := json.loads(line))["prompt"] == prompt]
        if samples:
            found.append({"step": step, "samples": samples})
        if len(found) == SHOWN:
            break
    return found[::-1]


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
