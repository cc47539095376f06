"""When a train function works, on how many ranks, and what it is paid for: after the samples, or while they come.

Streamed (functions/train/feed.py), a gang of N ranks is a server that takes prompt groups as they become ready, at
r_1 <= r_2 <= ..., with w_g seconds of one rank's work each. Begun at b it ends at

    end(b) = max(b + sum w / N,  max_g (r_g + sum_{h >= g} w_h / N)),      b* = end(-inf) - sum w / N

and b* is the latest begin that does not cost time and the earliest that does not pay ranks for waiting.

Arrays are of R steps side by side, of B ways of placing other functions before, of N numbers of ranks, of C begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.planner.arrays import Array, Flags, Numbers
from orchestrator.planner.latency import WorkCost

PACES = (0.85, 1.0, 1.15)
"""How long generation takes against its prediction, until there is experience."""
RANKS = 16
EARLY = (0.0, 0.1, 0.3)
"""Shares of the generation's time by which a streamed call may begin before b*."""


@dataclass(frozen=True)
class Batch:
    """What a step trains on, by prompt group."""

    ready_s: Array
    """When its samples and their columns are there. [R, G]"""
    samples: Array
    tokens: Array
    """[G] each"""
    longest: float
    """Tokens of the longest sample, its prompt included: no rank does less than one sample."""
    generated_s: Array
    """When the last sample is there. [R]"""

    def seconds(self, cost: WorkCost) -> Array:
        """Of one rank. [G]"""
        return cost.sample_s * self.samples + cost.token_s * self.tokens

    @cached_property
    def order(self) -> Numbers:
        """Groups as they are ready. [R, G]"""
        return np.argsort(self.ready_s, axis=1, kind="stable")

    def arrived_s(self, cost: WorkCost, counts: Sequence[int], paces: Sequence[float]) -> Array:
        """When a gang is done with the last group, if nothing else is to wait for, for each of `paces`. [P, R, N]"""
        key = (cost, tuple(counts), tuple(paces))
        if key not in self._arrived_s:
            ready_s = np.take_along_axis(self.ready_s, self.order, axis=1)
            left_s = np.cumsum(self.seconds(cost)[self.order][:, ::-1], axis=1)[:, ::-1]
            alone_s = cost.token_s * self.longest
            paced = [(pace * ready_s, pace * ready_s[:, -1] + alone_s) for pace in paces]
            each = [left_s / count for count in counts]
            self._arrived_s[key] = np.array(
                [[np.maximum((at_s + left).max(axis=1), last_s) for left in each] for at_s, last_s in paced]
            ).transpose(0, 2, 1)
        return self._arrived_s[key]

    _arrived_s: dict[tuple[WorkCost, tuple[int, ...], tuple[float, ...]], Array] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )


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
    streamed: bool
    groups: int = 0
    """How many are whole when the replicas of a streamed one are asked for."""

    @property
    def replica_s(self) -> float:
        return self.replicas * (self.end_s - self.open_s)


@dataclass(frozen=True)
class Gangs:
    """Trainers to choose from. [R, ...] each"""

    counts: Numbers
    open_s: Array
    call_s: Array
    end_s: Array
    mean_end_s: Array
    early: Flags
    """Called before all samples are there."""
    idle_s: Array
    """That it waits on average, started ahead of samples that come later."""

    @property
    def replica_s(self) -> Array:
        return self.counts * (self.end_s - self.open_s)

    @property
    def mean_replica_s(self) -> Array:
        return self.counts * (self.mean_end_s + self.idle_s - self.open_s)

    def beside(self, other: Gangs) -> Gangs:
        """Both; its own first in the last axis."""
        pairs = zip(self.columns(), other.columns(), strict=True)
        return Gangs(*(np.concatenate(pair, axis=-1) for pair in pairs))

    def pick(self, places: Numbers) -> Gangs:
        """Of each in the last axis but `places`' own. [..., K]"""
        before = np.ogrid[tuple(map(slice, places.shape))][:-1]
        return Gangs(*(column[(*before, places)] for column in self.columns()))

    def first(self) -> Gangs:
        """The first in the last axis."""
        return Gangs(*(column[..., 0] for column in self.columns()))

    def flat(self) -> Gangs:
        """All of a step in one row. [R, ...]"""
        return Gangs(*(column.reshape(len(column), -1) for column in self.columns()))

    def trainer(self, step: int, batch: Batch) -> Trainer:
        """Where each step has one. [R]"""
        open_s, call_s, end_s, mean_s = (float(times[step]) for times in self.columns()[1:5])
        groups = int(np.count_nonzero(batch.ready_s[step] < open_s))
        return Trainer(int(self.counts[step]), open_s, call_s, end_s, mean_s, bool(self.early[step]), groups)

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.counts, self.open_s, self.call_s, self.end_s, self.mean_end_s, self.early, self.idle_s


def at_once(
    batch: Batch, cost: WorkCost, counts: Sequence[int], *, ready_s: Array, start_s: float, rooms_s: Array,
    ahead: Flags, loads: bool, late: float = 0.0,
) -> Gangs:  # fmt: skip
    """All samples at `ready_s` [R, B]; [R, B, N, 1]. `rooms_s` [R, B, N]: when there is room. `ahead` [R]: the replicas
    start before that, where there is room; `loads`: and load what they need, which is taken to be half of the call's
    own seconds; publishing is the other half. `late`: of its time, that generation takes longer on average.
    """
    ranks, ready_s = np.array(counts), np.broadcast_to(ready_s[..., None], rooms_s.shape)
    own_s = cost.call_s + cost.shared_s / ranks
    load_s = own_s / 2 if loads else np.zeros(len(ranks))
    before_s = np.where(ahead[:, None, None], start_s + load_s, 0.0)
    open_s = np.maximum(np.maximum(rooms_s, ready_s - before_s), 0.0)
    call_s = np.maximum(open_s + start_s, ready_s - load_s)
    work_s = np.maximum(batch.seconds(cost).sum() / ranks, cost.token_s * batch.longest)
    end_s = np.maximum(call_s + load_s, ready_s) + work_s + own_s - load_s
    early = loads & (call_s < ready_s)
    last_s = batch.generated_s[:, None, None]
    idle_s = late * last_s * (ahead[:, None, None] & (open_s < last_s))
    counted = np.broadcast_to(ranks, end_s.shape)
    return Gangs(*(column[..., None] for column in (counted, open_s, call_s, end_s, end_s, early, idle_s)))


def streamed(
    batch: Batch, cost: WorkCost, counts: Sequence[int], *, start_s: float, rooms_s: Array, paces: Sequence[float]
) -> Gangs:
    """Groups as they are ready, begun at b* or a little before it, [R, B, N, C]: one for each share of EARLY. A begin
    is tied to how many groups are whole by then, so it comes earlier where generation is faster than predicted.

    `counts`: of ranks; `rooms_s` [R, B, N]: when there is room for each. `paces`: how generation may go, each as
    likely: 0.9 is every sample at 0.9 of the predicted time. Half of the call's own seconds are taken to be loading,
    half to be publishing.
    """
    ranks = np.array(counts)[:, None]
    own_s = cost.call_s / 2 + cost.shared_s / (2 * ranks)
    expected_s, *arrive_s = batch.arrived_s(cost, counts, (1.0, *paces))[:, :, None, :, None]
    whole_s, last_s = batch.seconds(cost).sum() / ranks, batch.ready_s.max(axis=1)[:, None, None, None]
    earliest_s = rooms_s[..., None] + start_s + own_s
    begin_s = np.maximum(np.maximum(expected_s - whole_s - last_s * np.array(EARLY), earliest_s), 0.0)
    end_s = np.maximum(begin_s + whole_s, expected_s) + own_s
    ends = [np.maximum(pace * begin_s + whole_s, at_s) + own_s for pace, at_s in zip(paces, arrive_s, strict=True)]
    call_s = np.maximum(0.0, begin_s - own_s)
    open_s = np.maximum(0.0, call_s - start_s)
    counted, early = np.broadcast_to(ranks, open_s.shape), np.ones(open_s.shape, np.bool_)
    idle_s = np.zeros(open_s.shape)  # it is in the mean of the ends
    return Gangs(counted, open_s, call_s, end_s, np.mean(ends, axis=0), early, idle_s)


def rank_counts(least: int, most: int) -> list[int]:
    """Numbers of ranks worth comparing: all up to 16, of more sixteen, evenly spaced on a logarithmic scale."""
    if most <= RANKS:
        return list(range(least, most + 1))
    return sorted({round(n) for n in np.geomspace(least, most, RANKS)}) if least < most else [most]
