"""When a train function works, on how many ranks, and what it is paid for: after the samples, or fed with them.

Fed (functions/train/feed.py), a gang of N ranks is a server that takes prompt groups as they become ready, at
r_1 <= r_2 <= ..., with w_g seconds of one rank's work each. Begun at b it ends at

    end(b) = max(b + sum w / N,  max_g (r_g + sum_{h >= g} w_h / N)),      b* = end(-inf) - sum w / N

and b* is the latest begin that does not cost time and the earliest that does not pay ranks for waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from orchestrator.planner.latency import WorkCost

Array = npt.NDArray[np.float64]

PACES = (0.85, 1.0, 1.15)
"""How long generation takes against its prediction, until there is experience."""
EARLY = (0.0, 0.05, 0.1, 0.2, 0.3)
"""Shares of the generation's time by which a fed call may begin before b*."""


@dataclass(frozen=True)
class Batch:
    """What a step trains on, by prompt group. [G] each"""

    ready_s: Array
    """When its samples and their columns are there."""
    samples: Array
    tokens: Array
    longest: float
    """Tokens of the longest sample, its prompt included: no rank does less than one sample."""

    def seconds(self, cost: WorkCost) -> Array:
        """Of one rank. [G]"""
        return cost.sample_s * self.samples + cost.token_s * self.tokens

    def whole_s(self, cost: WorkCost) -> float:
        """Of one rank, all groups."""
        if cost not in self._whole_s:
            self._whole_s[cost] = float(self.seconds(cost).sum())
        return self._whole_s[cost]

    _whole_s: dict[WorkCost, float] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Trainer:
    """A train function in a step. Seconds from the step's start."""

    replicas: int
    open_s: float
    """Its replicas are asked for,"""
    call_s: float
    """are up and get their call,"""
    end_s: float
    """have published, if all goes as predicted;"""
    mean_end_s: float
    """on average over how generation may go."""
    fed: bool
    groups: int = 0
    """How many are whole when the replicas are asked for; 0: it is not tied to them (before the first, after all)."""

    @property
    def replica_s(self) -> float:
        return self.replicas * (self.end_s - self.open_s)

    @property
    def mean_replica_s(self) -> float:
        return self.replicas * (self.mean_end_s - self.open_s)


def at_once(
    batch: Batch, cost: WorkCost, replicas: int, *, ready_s: float, start_s: float, room_at_s: float, ahead: bool,
    loads: bool,
) -> Trainer:  # fmt: skip
    """All samples at `ready_s`. `ahead`: the replicas start before that, where there is room; `loads`: and load what
    they need, which is taken to be half of the call's own seconds; publishing is the other half.
    """
    load_s = cost.call_s / 2 if loads else 0.0
    open_s = max(room_at_s, ready_s - start_s - load_s if ahead else ready_s, 0.0)
    call_s = max(open_s + start_s, ready_s - load_s)
    work_s = max(batch.whole_s(cost) / replicas, cost.token_s * batch.longest)
    end_s = max(call_s + load_s, ready_s) + work_s + cost.call_s - load_s
    early = loads and call_s < ready_s
    groups = int(np.count_nonzero(batch.ready_s < open_s)) if early else 0
    return Trainer(replicas, open_s, call_s, end_s, end_s, early, groups)


def fed(
    batch: Batch, cost: WorkCost, replicas: int, *, start_s: float, room_at_s: float, paces: Sequence[float]
) -> list[Trainer]:
    """Groups as they are ready, begun at b* or a little before it, several of them to choose from. A begin is tied to
    how many groups are whole by then, so it comes earlier where generation is faster than predicted.

    `paces`: how generation may go, each as likely: 0.9 is every sample at 0.9 of the predicted time. Half of the call's
    own seconds are taken to be loading, half to be publishing.
    """
    order = np.argsort(batch.ready_s, kind="stable")
    ready_s, work_s = batch.ready_s[order], batch.seconds(cost)[order] / replicas
    left_s, own_s = np.cumsum(work_s[::-1])[::-1], cost.call_s / 2
    alone_s = cost.token_s * batch.longest

    def arrived_s(pace: float) -> float:
        """When the last group is done with, if nothing else is to wait for."""
        return max(float((pace * ready_s + left_s).max()), pace * float(ready_s[-1]) + alone_s)

    limits_s = [arrived_s(pace) for pace in (1.0, *paces)]
    latest_s, earliest_s = limits_s[0] - float(left_s[0]), room_at_s + start_s + own_s
    found = []
    for early in EARLY:
        begin_s = max(latest_s - early * float(ready_s[-1]), earliest_s, 0.0)
        pairs = zip((1.0, *paces), limits_s, strict=True)
        ends = [max(pace * begin_s + float(left_s[0]), limit) + own_s for pace, limit in pairs]
        call_s = max(0.0, begin_s - own_s)
        mean_s, open_s = sum(ends[1:]) / len(paces), max(0.0, call_s - start_s)
        groups = int(np.searchsorted(ready_s, open_s)) if open_s < ready_s[-1] else 0
        found.append(Trainer(replicas, open_s, call_s, ends[0], mean_s, True, groups))
    return found


def rank_counts(least: int, most: int) -> list[int]:
    """Numbers of ranks worth comparing: eight at most, evenly spaced on a logarithmic scale."""
    return sorted({round(n) for n in np.geomspace(least, most, 8)}) if least < most else [most]


class Room:
    """GPUs of a pool over time, as functions are placed one after the other; `gpus` None: each has its own."""

    def __init__(self, gpus: int | None) -> None:
        self._free = gpus
        self._freed: list[tuple[float, int]] = []

    def take(self, gpus: int, until_s: float) -> None:
        """From the step's start to `until_s`."""
        if self._free is not None:
            self._free -= gpus
            self._freed.append((until_s, gpus))
            self._freed.sort()

    def less(self, gpus: int, until_s: float) -> Room:
        """The same with so many taken."""
        other = Room(self._free)
        other._freed = list(self._freed)
        other.take(gpus, until_s)
        return other

    def at_s(self, gpus: int) -> float:
        """When so many are free at the earliest."""
        if self._free is None:
            return 0.0
        free, at_s = self._free, 0.0
        for at_s, more in [(0.0, 0), *self._freed]:
            free += more
            if free >= gpus:
                return at_s
        return at_s
