"""When a train function works, on how many ranks, and what it is paid for: after the samples, or fed with them.

Fed (functions/train/feed.py), a gang of N ranks is a server that takes prompt groups as they become ready, at
r_1 <= r_2 <= ..., with w_g seconds of one rank's work each. Begun at b it ends at

    end(b) = max(b + sum w / N,  max_g (r_g + sum_{h >= g} w_h / N)),      b* = end(-inf) - sum w / N

and b* is the latest begin that does not cost time and the earliest that does not pay ranks for waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.planner.latency import WorkCost

Array = npt.NDArray[np.float64]

PACES = (0.85, 1.0, 1.15)
"""How long generation takes against its prediction, until there is experience."""
RANKS = 16
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

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Groups as they are ready."""
        return np.argsort(self.ready_s, kind="stable")

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


@dataclass(frozen=True)
class Gangs:
    """Trainers to choose from: a row for each number of ranks, a column for each begin. [N, C] each"""

    batch: Batch
    counts: npt.NDArray[np.int64]
    """[N]"""
    open_s: Array
    call_s: Array
    end_s: Array
    mean_end_s: Array
    early: npt.NDArray[np.bool_]
    """Called before all samples are there."""
    tied: npt.NDArray[np.bool_]
    """Opened when so many groups are whole."""

    @property
    def mean_replica_s(self) -> Array:
        paid: Array = self.counts[:, None] * (self.mean_end_s - self.open_s)
        return paid

    def beside(self, other: Gangs) -> Gangs:
        """Both; its own columns first."""
        pairs = zip(self._columns(), other._columns(), strict=True)
        return Gangs(self.batch, self.counts, *(np.concatenate(pair, axis=1) for pair in pairs))

    def pick(self, columns: npt.NDArray[np.int64]) -> Gangs:
        """One of each row."""
        return Gangs(self.batch, self.counts, *(np.take_along_axis(c, columns[:, None], 1) for c in self._columns()))

    def trainer(self, row: int, column: int) -> Trainer:
        open_s, call_s, end_s, mean_s = (float(times[row, column]) for times in self._columns()[:4])
        groups = int(np.count_nonzero(self.batch.ready_s < open_s)) if self.tied[row, column] else 0
        return Trainer(int(self.counts[row]), open_s, call_s, end_s, mean_s, bool(self.early[row, column]), groups)

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.open_s, self.call_s, self.end_s, self.mean_end_s, self.early, self.tied


def at_once(
    batch: Batch, cost: WorkCost, counts: Sequence[int], *, ready_s: Array, start_s: float, rooms_s: Sequence[float],
    ahead: bool, loads: bool,
) -> Gangs:  # fmt: skip
    """All samples at `ready_s` [N]; one column. `ahead`: the replicas start before that, where there is room; `loads`:
    and load what they need, which is taken to be half of the call's own seconds; publishing is the other half.
    """
    ranks = np.array(counts)
    own_s = cost.call_s + cost.shared_s / ranks
    load_s = own_s / 2 if loads else np.zeros(len(ranks))
    open_s = np.maximum(np.maximum(rooms_s, ready_s - start_s - load_s if ahead else ready_s), 0.0)
    call_s = np.maximum(open_s + start_s, ready_s - load_s)
    work_s = np.maximum(batch.whole_s(cost) / ranks, cost.token_s * batch.longest)
    end_s = np.maximum(call_s + load_s, ready_s) + work_s + own_s - load_s
    early = loads & (call_s < ready_s)
    open_s, call_s, end_s, early = open_s[:, None], call_s[:, None], end_s[:, None], early[:, None]
    return Gangs(batch, ranks, open_s, call_s, end_s, end_s, early, early)


def fed(
    batch: Batch, cost: WorkCost, counts: Sequence[int], *, start_s: float, rooms_s: Sequence[float],
    paces: Sequence[float],
) -> Gangs:  # fmt: skip
    """Groups as they are ready, begun at b* or a little before it, a column for each share of EARLY. A begin is tied to
    how many groups are whole by then, so it comes earlier where generation is faster than predicted.

    `counts`: of ranks; `rooms_s`: when there is room for each. `paces`: how generation may go, each as likely: 0.9 is
    every sample at 0.9 of the predicted time. Half of the call's own seconds are taken to be loading, half to be
    publishing.
    """
    ready_s = batch.ready_s[batch.order]
    different = {count: row for row, count in enumerate(dict.fromkeys(counts))}
    row = [different[count] for count in counts]
    left_s = np.cumsum(batch.seconds(cost)[batch.order][::-1])[::-1] / np.array(list(different))[:, None]
    ranks = np.array(counts)[:, None]
    own_s = cost.call_s / 2 + cost.shared_s / (2 * ranks)
    alone_s, last_s, whole_s = cost.token_s * batch.longest, float(ready_s[-1]), left_s[row, :1]

    def arrived_s(pace: float) -> Array:
        """When the last group is done with, if nothing else is to wait for. [N, 1]"""
        late = (pace * ready_s + left_s).max(axis=1)
        found: Array = np.maximum(late[row][:, None], pace * last_s + alone_s)
        return found

    arrive_s = {pace: arrived_s(pace) for pace in {1.0, *paces}}
    expected_s = arrive_s[1.0]
    earliest_s = np.array(rooms_s)[:, None] + start_s + own_s
    begin_s = np.maximum(np.maximum(expected_s - whole_s - last_s * np.array(EARLY), earliest_s), 0.0)
    end_s = np.maximum(begin_s + whole_s, expected_s) + own_s
    ends = [np.maximum(pace * begin_s + whole_s, arrive_s[pace]) + own_s for pace in paces]
    call_s = np.maximum(0.0, begin_s - own_s)
    open_s = np.maximum(0.0, call_s - start_s)
    early = np.ones(open_s.shape, np.bool_)
    return Gangs(batch, np.array(counts), open_s, call_s, end_s, np.mean(ends, axis=0), early, open_s < last_s)


def rank_counts(least: int, most: int) -> list[int]:
    """Numbers of ranks worth comparing: all up to 16, of more sixteen, evenly spaced on a logarithmic scale."""
    if most <= RANKS:
        return list(range(least, most + 1))
    return sorted({round(n) for n in np.geomspace(least, most, RANKS)}) if least < most else [most]


class Room:
    """GPUs of a pool over time, as functions are placed one after the other; `gpus` None: each has its own."""

    def __init__(self, gpus: int | None) -> None:
        self._gpus = gpus
        self._profiles: list[dict[float, int]] = [{}]
        """Changes of the number of free GPUs by time: as planned; and with what is promised held from the start."""
        self._promised = (0, 0.0)
        """GPUs, and until when."""
        self._free: list[_Free] = []
        """Of each profile, until something is taken."""

    def take(self, gpus: int, until_s: float, from_s: float = 0.0) -> None:
        """From `from_s` to `until_s`."""
        self._free = []
        for changes in self._profiles:
            changes[from_s] = changes.get(from_s, 0) - gpus
            changes[until_s] = changes.get(until_s, 0) + gpus

    def promise(self, gpus: int, until_s: Sequence[float], from_s: float) -> None:
        """To replicas of `gpus` each from `from_s` to each of `until_s`, whenever they come before that: whoever is
        placed after this, and waits for what they make, leaves them room even if all goes otherwise than planned. What
        was placed before this does not wait for them.
        """
        for at_s in until_s:
            self.take(gpus, at_s, from_s)
        self._promised = (gpus * len(until_s), max(until_s))
        self._profiles.append({0.0: -self._promised[0], self._promised[1]: self._promised[0]})
        self._free = []

    def begun(self, by_s: float) -> None:
        """Those to whom it is promised have it by then, however late that comes."""
        gpus, until_s = self._promised
        if by_s < until_s:
            changes, self._free = self._profiles[1], []
            changes[until_s] -= gpus
            changes[by_s] = changes.get(by_s, 0) + gpus

    def less(self, gpus: int, until_s: float) -> Room:
        """The same with so many taken."""
        other = Room(self._gpus)
        other._profiles = [dict(changes) for changes in self._profiles]
        other.take(gpus, until_s)
        return other

    def at_s(self, gpus: int) -> float:
        """From when on so many are free for good."""
        return 0.0 if self._gpus is None else max(free.at_s(gpus) for free in self._frees(self._gpus))

    def each_at_s(self, gpus: Sequence[int]) -> list[float]:
        """The same for several numbers."""
        if self._gpus is None:
            return [0.0] * len(gpus)
        found = [[free.at_s(n) for n in gpus] for free in self._frees(self._gpus)]
        return found[0] if len(found) == 1 else [max(times) for times in zip(*found, strict=True)]

    def fits(self, gpus: int) -> bool:
        """Whether so many are free at any time beside what is promised."""
        return self._gpus is None or all(free.at_s(gpus) == 0.0 for free in self._frees(self._gpus)[1:])

    def _frees(self, gpus: int) -> list[_Free]:
        self._free = self._free or [_Free(gpus, changes) for changes in self._profiles]
        return self._free


class _Free:
    """From when on how many GPUs are free for good, by changes of their number. `free`: after all of them."""

    def __init__(self, free: int, changes: Mapping[float, int]) -> None:
        self._least: list[int] = []
        """Free from some change on at the least, times -1, from the last change back; ascending."""
        self._from_s: list[float] = []
        """When each of these is not yet so."""
        at_s, least = max(changes, default=0.0), free
        for time_s in sorted(changes, reverse=True):  # free: from `time_s` to `at_s`
            least = min(least, free)
            self._least.append(-least)
            self._from_s.append(at_s)
            free, at_s = free - changes[time_s], time_s

    def at_s(self, gpus: int) -> float:
        place = bisect_right(self._least, -gpus)
        return self._from_s[place] if place < len(self._least) else 0.0
