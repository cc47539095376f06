"""How generation goes with each way to deal the samples and each cut of its tail: the rows of all that follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from orchestrator.planner.arrays import Array, Numbers
from orchestrator.planner.case import Case
from orchestrator.planner.cuts import Dealt
from orchestrator.planner.tail import TailChoice


@dataclass(frozen=True)
class Generations:
    """Of R steps. [R] each; seconds from the step's start."""

    way: Numbers
    """Place of each among the ways to deal the samples."""
    exchange: Array
    """What each is planned for (scaling.py)."""
    shards: Numbers
    finish_s: Array
    """When the samples are finished, ascending, [R, S]"""
    numbers: Numbers
    """and which they are. [R, S]"""
    gone_s: Array
    """When replicas of generate are let go, ascending; 0.0 of those that were never there. [R, N]"""
    generate_s: Array
    """Replica-seconds, without starts,"""
    tail_s: Array
    """and of the tail function."""
    tail_gone_s: Array
    """When its replicas are let go; 0.0 of those that were never there. [R, M]"""
    open_s: Array
    """When they are asked for."""
    cut_below: Numbers

    @classmethod
    def of(cls, case: Case, ways: Sequence[Dealt], rows: Sequence[tuple[int, float, TailChoice]]) -> Self:
        """`rows`: of each a way's place, an exchange, and what becomes of the tail."""
        finished = [ways[way].finish(tail) for way, _, tail in rows]
        finish_s, numbers = np.stack([times for times, _ in finished]), np.stack([named for _, named in finished])
        if case.policy.fuse == "no":
            finish_s, numbers = np.repeat(finish_s[:, -1:], finish_s.shape[1], axis=1), np.sort(numbers, axis=1)
        choices = [tail for _, _, tail in rows]
        return cls(
            np.array([way for way, _, _ in rows]),
            np.array([exchange for _, exchange, _ in rows]),
            np.array([len(ways[way].shards) for way, _, _ in rows]),
            finish_s + case.delay_s,
            numbers,
            _columns([ways[way].gone_s(tail) for way, _, tail in rows], case.delay_s),
            np.array([t.replica_s for t in choices]),
            np.array([t.tail_s for t in choices]),
            _columns([t.ends_s for t in choices], case.delay_s),
            np.array([t.open_s for t in choices]) + case.delay_s,
            np.array([t.cut_below for t in choices]),
        )


def _columns(rows: Sequence[Sequence[float] | Array], later_s: float) -> Array:
    """Times of each row, so much later, ascending; rows that have fewer begin with 0.0. [R, N]"""
    found = np.zeros((len(rows), max(len(row) for row in rows)))
    for k, row in enumerate(rows):
        if len(row):
            found[k, -len(row) :] = np.sort(row) + later_s
    return found
