"""Which samples go to which replica, and how long that takes: the curve T(N) in one sweep.

Sort samples by predicted length, longest first; a shard is a run of that order. Similar lengths stand together, so that
a shard's steps (its longest sample) are not spent on short ones, and short shards end early and give their replica back
(RLHFless). For a target time T shards are filled greedily, each to the last sample that still ends within T: the fewest
runs for T. Sweeping T gives the least N for each T, which is T(N).

All samples of a prompt have the same predicted length, so they stand next to each other and at most one prompt is split
per boundary: it is split when its prompt's prefill, computed once more, costs less than the decode time it evens out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from orchestrator.planner.arrays import Array, Numbers
from orchestrator.planner.latency import GenerateCost, kv_token_steps
from orchestrator.planner.scaling import Unmet
from orchestrator.planner.static import balance

TARGETS = 24
"""Times for which runs are filled."""


@dataclass(frozen=True)
class Workload:
    """The samples of a step, by prompt row, longest predicted first (`order`). Lengths in tokens, [P] each."""

    order: Numbers
    prompt_tokens: Array
    """Of each prompt; tokens of a head that all prompts share are counted in `head_tokens` alone."""
    mean: Array
    """Predicted mean response length."""
    longest: Array
    """What the longest sample of a shard that begins with this prompt is expected to reach."""
    samples_per_prompt: int
    head_tokens: int = 0

    @classmethod
    def of(
        cls, prompt_tokens: Array, mean: Array, longest: Array, samples_per_prompt: int, head_tokens: int = 0
    ) -> Self:
        order = np.lexsort((np.arange(len(mean)), -longest, -mean))
        return cls(
            order,
            prompt_tokens[order] - head_tokens,
            mean[order],
            np.maximum.accumulate(longest[order][::-1])[::-1],
            samples_per_prompt,
            head_tokens,
        )


@dataclass(frozen=True)
class Run:
    """Samples [start, stop) of the sorted order (sample = position of prompt * n + index), and its work in seconds."""

    start: int
    stop: int
    work_s: float


class Filler:
    """Prefix sums over the sorted samples, so that the work of any run is known in O(1)."""

    def __init__(self, load: Workload, cost: GenerateCost, max_batch: int, kv_tokens: int | None) -> None:
        n = load.samples_per_prompt
        prompt = load.prompt_tokens + load.head_tokens
        room = np.full(len(prompt), float(max_batch))
        if kv_tokens is not None:
            room = np.minimum(room, np.floor(kv_tokens / (prompt + load.longest)))
            if (room < 1).any():
                row = int(np.argmin(room))
                raise Unmet(
                    f"a sample of {prompt[row]:.0f} + {load.longest[row]:.0f} tokens does not fit the KV capacity of "
                    f"{kv_tokens} tokens (wants max_response_length <= {max(0, int(kv_tokens - prompt[row]))})"
                )
        self.load, self.cost, self.count = load, cost, len(prompt) * n
        self.slots = np.repeat(room, n)
        self.longest = np.repeat(load.longest, n)
        self.prefill_s = cost.prefill_token_s * load.prompt_tokens
        self.head_s = cost.call_s + cost.prefill_token_s * load.head_tokens
        decode_s = cost.sequence_s * load.mean + cost.kv_token_s * kv_token_steps(prompt, load.mean)
        first = np.zeros(self.count)
        first[::n] = self.prefill_s
        self.linear = np.concatenate(([0.0], np.cumsum(np.repeat(decode_s, n) + first)))
        self.tokens = np.concatenate(([0.0], np.cumsum(np.repeat(load.mean, n))))
        self.sample_s = decode_s + cost.step_s * load.mean / room
        """[P]: what one more sample of a prompt adds to a full replica."""

    def work_s(self, start: int, stop: int) -> float:
        """One replica's time for the run: prefill, and the longest sample's steps or as many as the slots need."""
        n = self.load.samples_per_prompt
        again = self.prefill_s[start // n] if start % n else 0.0
        steps = max(self.longest[start], (self.tokens[stop] - self.tokens[start]) / self.slots[start])
        linear = self.linear[stop] - self.linear[start] + again
        return float(self.head_s + linear + self.cost.step_s * steps)

    def fill(self, target_s: float, limit: int | None = None) -> list[Run] | None:
        """The fewest runs that each end within `target_s`; None when one sample alone does not, or `limit` is passed.

        A run of one whole prompt or part of it is always allowed to be as short as one sample.
        """
        n, runs, start = self.load.samples_per_prompt, list[Run](), 0
        while start < self.count:
            if limit is not None and len(runs) == limit:
                return None
            again = self.prefill_s[start // n] if start % n else 0.0
            left = target_s - self.head_s - again
            by_longest = left - self.cost.step_s * self.longest[start] + self.linear[start]
            stop = int(np.searchsorted(self.linear, by_longest, side="right")) - 1
            if stop - start > self.slots[start]:
                stop = min(stop, self._queue_stop(start, left))
            if stop <= start:
                return None
            stop = self._snap(start, min(stop, self.count))
            runs.append(Run(start, stop, self.work_s(start, stop)))
            start = stop
        return runs

    def _queue_stop(self, start: int, left_s: float) -> int:
        """The last sample by which a full replica, refilling its slots, ends within `left_s`."""
        per_token = self.cost.step_s / self.slots[start]
        low, high = start, self.count
        while low < high:
            middle = (low + high + 1) // 2
            used = self.linear[middle] - self.linear[start] + per_token * (self.tokens[middle] - self.tokens[start])
            low, high = (middle, high) if used <= left_s else (low, middle - 1)
        return low

    def _snap(self, start: int, stop: int) -> int:
        """`stop`, moved back to the head of its prompt unless splitting that prompt pays."""
        n = self.load.samples_per_prompt
        inside = stop % n
        if inside == 0 or stop == self.count or stop - inside <= start:
            return stop
        row = stop // n
        return stop if self.prefill_s[row] < inside * self.sample_s[row] else stop - inside


def sweep(filler: Filler, max_replicas: int) -> dict[int, list[Run]]:
    """For each N that can be the fewest replicas for some time: its runs. T(N) is the longest `work_s` in them.

    Targets are spaced evenly in N's natural scale: the least possible time for 1, 2, 4, ... `max_replicas` replicas,
    each then lowered by bisection until it needs one replica more.
    """
    whole_s = filler.work_s(0, filler.count)
    curve: dict[int, list[Run]] = {1: [Run(0, filler.count, whole_s)]}
    alone_s = max(filler.work_s(0, 1), filler.work_s(filler.count - 1, filler.count))
    for target_s in np.geomspace(whole_s, alone_s, TARGETS)[1:]:
        runs = filler.fill(float(target_s), max_replicas)
        if runs is None:
            break
        known = curve.get(len(runs))
        if known is None or makespan_s(runs) < makespan_s(known):
            curve[len(runs)] = runs
    last = max(curve)
    if last < max_replicas and last < filler.count:  # the fastest within the limit
        runs = tighten(filler, max_replicas)
        if makespan_s(runs) < makespan_s(curve[last]):
            curve[len(runs)] = runs
    return dict(sorted(curve.items()))


def tighten(filler: Filler, replicas: int, *, rounds: int = 12) -> list[Run]:
    """The runs for at most `replicas` replicas with the least longest run, to 2^-rounds of the range."""
    best = [Run(0, filler.count, filler.work_s(0, filler.count))]
    low, high = 0.0, best[0].work_s
    for _ in range(rounds):
        middle = 0.5 * (low + high)
        runs = filler.fill(middle, replicas)
        if runs is None:
            low = middle
        else:
            best, high = runs, makespan_s(runs)
            low = min(low, high)
    return best


def makespan_s(runs: Sequence[Run]) -> float:
    return max(run.work_s for run in runs)


def shards(load: Workload, runs: Sequence[Run]) -> list[list[int]]:
    """Sample numbers (prompt row * n + index) of each run, longest first."""
    n = load.samples_per_prompt
    numbers = (load.order[:, None] * n + np.arange(n)).reshape(-1)
    return [numbers[run.start : run.stop].tolist() for run in runs]


def together(mean: Array, families: Numbers, bins: int) -> list[list[int]]:
    """Prompts [P] to at most `bins` bins of about equal predicted tokens, those of one family in as few as can be.

    A family of about k bins' share of all tokens is k units, others are one; units are dealt out longest first.
    """
    share = mean.sum() / bins
    units: list[list[int]] = []
    for family in np.unique(families).tolist():
        rows = np.flatnonzero(families == family)
        units += [rows[part].tolist() for part in balance(mean[rows].tolist(), max(1, round(mean[rows].sum() / share)))]
    dealt = balance([float(mean[unit].sum()) for unit in units], bins)
    return [sorted((row for k in bin_ for row in units[k]), key=lambda row: (-mean[row], row)) for bin_ in dealt]
