"""What the functions of a job cost in time: their latency models, learned from the calls that were made."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.planner.arrays import Array
from orchestrator.planner.base import GENERATE, TAIL, CallObservation
from orchestrator.planner.latency import GenerateCost, LinearFit, WorkCost, relative_errors

STARTS_KEPT = 64
_COUNTS = ("prefill_tokens", "prefill_s", "decode_tokens", "decode_steps", "decode_s")
_WORK = ("samples", "tokens")


@dataclass(frozen=True)
class Priors:
    """What is believed before anything was observed; a function without an entry is unknown until it was called."""

    generate: GenerateCost | None = None
    work: Mapping[str, WorkCost] = field(default_factory=dict)
    start_s: Mapping[str, float] = field(default_factory=dict)
    """Cold start, by function."""
    tail: GenerateCost | None = None
    """Of the function that a tail may go on with."""


class LearnedCosts:
    """`shared`: functions start in a pool that others may fill. `gangs`: whose replicas make one call together."""

    def __init__(
        self, priors: Priors | None = None, *, gangs: Collection[str] = ("train",), shared: bool = False,
    ) -> None:  # fmt: skip
        self.priors = priors or Priors()
        self.gangs = frozenset(gangs)
        self.shared = shared
        self._generators = {GENERATE: GenerateFit(self.priors.generate), TAIL: GenerateFit(self.priors.tail)}
        self._work = {f: LinearFit(*_features(f in self.gangs, c)) for f, c in self.priors.work.items()}
        self.passes: dict[str, int] = {}
        """How often a sample goes through a function in a step: twice where it also says what the actor thinks."""
        self._last: dict[str, set[float]] = {}
        """Values of WorkCost's last count that were seen: a single one says no more than the call's own seconds."""
        self._starts: dict[str, deque[float]] = {}
        self._between: deque[float] = deque(maxlen=STARTS_KEPT)

    @property
    def generate(self) -> GenerateCost | None:
        return self._generators[GENERATE].cost

    @property
    def tail(self) -> GenerateCost | None:
        return self._generators[TAIL].cost

    def work(self, function: str) -> WorkCost | None:
        fit = self._work.get(function)
        if fit is None or fit.theta is None:
            return None
        call, sample, token, last = (float(v) for v in fit.theta)
        gang = function in self.gangs
        return WorkCost(call, sample, token, last if gang else 0.0, 0.0 if gang else last)

    def starts_s(self, function: str) -> Sequence[float]:
        """Recent cold starts; before the first, the prior. In a shared pool a start also waits for room, which says
        nothing of the function: the shortest.
        """
        if starts := self._starts.get(function):
            return [min(starts)] if self.shared else list(starts)
        return [self.priors.start_s[function]] if function in self.priors.start_s else []

    def start_s(self, function: str) -> float:
        """A typical cold start; 0 while nothing is known of it."""
        starts = self.starts_s(function)
        return float(np.median(starts)) if starts else 0.0

    @property
    def between_s(self) -> float:
        """Of a typical step in which no call is open: drawing, planning, what lies between two stages."""
        return float(np.median(self._between)) if self._between else 0.0

    def observe(
        self, calls: Sequence[CallObservation], lengths: Array, step_s: float | None, prewarmed: Collection[str] = ()
    ) -> dict[str, float]:
        """Learns from a step's calls; returns the relative error of what was believed before, by function.

        `lengths` [S]: of the step's responses (GenerateFit). A call that tells no counts says nothing.
        `step_s` None: of a step whose time between calls is not typical.
        A cold start goes on until the replica has loaded. Those of `prewarmed` functions were partly over when they
        were called: they tell nothing.
        """
        if step_s is not None:
            self._between.append(max(0.0, step_s - open_s(calls)))
        metrics: dict[str, float] = {}
        by_function: dict[str, list[CallObservation]] = {}
        for call in calls:
            by_function.setdefault(call.function, []).append(call)
            if call.cold and call.function not in prewarmed:
                cold_s = call.start_s + call.stats.get("load_s", 0.0)
                self._starts.setdefault(call.function, deque(maxlen=STARTS_KEPT)).append(cold_s)
        for function, made in sorted(by_function.items()):
            if function in self._generators:
                made = [c for c in made if all(count in c.stats for count in _COUNTS)]
                errors = self._generators[function].observe(made, lengths) if made else np.zeros(0)
            else:
                made = longest_ranks([c for c in made if all(count in c.stats for count in _WORK)])
                errors = self._observe_work(function, made) if made else np.zeros(0)
                if made and len(lengths):
                    self.passes[function] = max(1, round(sum(c.stats["samples"] for c in made) / len(lengths)))
            if len(errors):
                metrics[f"planner/error/{function}"] = float(np.median(errors))
        return metrics

    def _observe_work(self, function: str, calls: Sequence[CallObservation]) -> Array:
        ranks = [max(1.0, c.stats.get("ranks", 1.0)) for c in calls]
        fit = self._work.setdefault(function, LinearFit(*_features(function in self.gangs)))
        gang = function in self.gangs
        last = [1.0 / n if gang else float(c.cold) for c, n in zip(calls, ranks, strict=True)]
        rows = [(1.0, *(c.stats[count] / n for count in _WORK)) for c, n in zip(calls, ranks, strict=True)]
        seen = self._last.setdefault(function, set())
        seen.update(last)
        known = self.priors.work.get(function)
        apart = len(seen) > 1 or (known is not None and max(known.shared_s, known.first_s) > 0.0)
        x = np.column_stack((np.array(rows), np.array(last) * apart))
        y = np.array([c.work_s - c.stats.get("waited_s", 0.0) - _start_load_s(c) for c in calls])
        errors = np.zeros(0) if fit.theta is None else relative_errors(fit.predict(x), y)
        fit.observe(x, y)
        return errors


def _features(gang: bool, prior: WorkCost | None = None) -> tuple[int, list[float] | None]:
    """How many coefficients of WorkCost are learned of a function, and what is believed of them: the last is what the
    ranks of a gang share of a call, of other functions what a replica's first call takes more.
    """
    if prior is None:
        return 4, None
    last = prior.shared_s if gang else prior.first_s
    return 4, [prior.call_s, prior.sample_s, prior.token_s, last]


class GenerateFit:
    """The cost of a function that generates; None until there is a prior or a call was seen."""

    def __init__(self, prior: GenerateCost | None) -> None:
        self._overhead = LinearFit(1, None if prior is None else [prior.call_s])
        self._prefill = LinearFit(1, None if prior is None else [prior.prefill_token_s])
        self._moved = LinearFit(1, None if prior is None or prior.moved_token_s is None else [prior.moved_token_s])
        self._moves = True
        """Whether what was cut last came with its keys and values."""
        self._decode = LinearFit(3, None if prior is None else [prior.step_s, prior.sequence_s, prior.kv_token_s])

    @property
    def cost(self) -> GenerateCost | None:
        if self._decode.theta is None or self._prefill.theta is None:
            return None
        call = 0.0 if self._overhead.theta is None else float(self._overhead.theta[0])
        step, sequence, kv_token = (float(v) for v in self._decode.theta)
        moved = float(self._moved.theta[0]) if self._moves and self._moved.theta is not None else None
        return GenerateCost(call, float(self._prefill.theta[0]), step, sequence, kv_token, moved)

    def observe(self, calls: Sequence[CallObservation], lengths: Array) -> Array:
        """Learns from a step's calls; their relative errors.

        A call tells the sum of the lengths that it made, not that of their squares, which the keys and values read
        depend on: they are taken to be spread as the step's `lengths` [S] are, none longer than the call's steps. What
        its samples held when they came (prompt, and tokens of a call that was cut) is what it computed, shared or took
        up with their keys and values.
        """
        count = {name: np.array([c.stats[name] for c in calls], dtype=np.float64) for name in _COUNTS}
        samples = np.array([max(1, c.samples) for c in calls], dtype=np.float64)
        shared = np.array([c.stats.get("shared_tokens", 0.0) for c in calls])
        prompt = np.array([c.prompt_tokens for c in calls], dtype=np.float64)
        moved, moved_s = (np.array([c.stats.get(name, 0.0) for c in calls]) for name in ("moved_tokens", "moved_s"))
        came = np.maximum(prompt, count["prefill_tokens"] + shared + moved) / samples
        spread = np.array([_squared_per_token(np.minimum(lengths, s)) for s in count["decode_steps"]])
        held = count["decode_tokens"] * (came + 0.5 * spread)
        x = np.column_stack((count["decode_steps"], count["decode_tokens"], held))
        work = np.array([c.work_s - _start_load_s(c) for c in calls], dtype=np.float64)
        errors = np.zeros(0)
        if (cost := self.cost) is not None:
            believed = cost.call_s + cost.prefill_token_s * count["prefill_tokens"] + self._decode.predict(x)
            believed += (cost.moved_token_s or 0.0) * moved
            errors = relative_errors(believed, work)
        self._prefill.observe(count["prefill_tokens"][:, None], count["prefill_s"])
        self._decode.observe(x, count["decode_s"])
        self._moved.observe(moved[:, None], moved_s)
        again = np.maximum(0.0, count["prefill_tokens"] + shared - prompt)  # of what was cut
        if (moved + again).any():
            self._moves = bool(moved.sum() > again.sum())
        self._overhead.observe(np.ones((len(calls), 1)), work - count["prefill_s"] - count["decode_s"] - moved_s)
        return errors


def _start_load_s(call: CallObservation) -> float:
    """Of a replica's first call: what it waited for the weights, which is part of the replica's start."""
    return call.stats.get("load_s", 0.0) if call.cold else 0.0


def _squared_per_token(lengths: Array) -> float:
    total = float(lengths.sum())
    return float((lengths**2).sum()) / total if total else 0.0


def longest_ranks(calls: Sequence[CallObservation]) -> list[CallObservation]:
    """Of each gang (`ranks` calls one after the other, each of which tells the counts of the whole) its slowest rank:
    the gang takes as long as that one."""
    found: list[CallObservation] = []
    at = 0
    while at < len(calls):
        ranks = max(1, int(calls[at].stats.get("ranks", 1)))
        found.append(max(calls[at : at + ranks], key=lambda call: call.work_s))
        at += ranks
    return found


def open_s(calls: Sequence[CallObservation]) -> float:
    """Seconds in which at least one call was open or waited for its replica."""
    total, reached = 0.0, -np.inf
    for begin, end in sorted((c.stop_s - c.work_s - c.start_s, c.stop_s) for c in calls):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return float(total)
