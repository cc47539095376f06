"""Reward and reference beside generation: how many finished samples to hand on at a time, on how many replicas.

RLHFuse's sample-level fusion. Finished samples are scored while the tail still generates, so that the step ends sooner;
but a replica is paid for from its first call to its last, and idle while it waits for the next micro-batch. Both are
computed for a few micro-batch sizes and replica counts, by list scheduling over the predicted finish times, of many
steps side by side.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from orchestrator.planner.arrays import Array, Flags, Numbers
from orchestrator.planner.latency import WorkCost


@dataclass(frozen=True)
class Follower:
    """A stage that works on finished samples: from its first call to its last, and what its replicas are paid for. Of R
    steps, [R] each."""

    replicas: Numbers
    begin_s: Array
    end_s: Array
    replica_s: Array
    done_s: Array
    """When each micro-batch is done with. [R, M]"""


@dataclass(frozen=True)
class Parts:
    """The micro-batches of R steps, each of its own size, in the order in which they are ready, each with its last
    sample. [R, M]; those of a step that has fewer are empty."""

    ready_s: Array
    sizes: Numbers
    tokens: Array
    place: Numbers
    """Of each sample in the order in which they are finished: its micro-batch. [R, S]"""

    @classmethod
    def of(cls, finish_s: Array, tokens: Array, sizes: Numbers) -> Self:
        """`finish_s` [R, S] ascending: when samples are finished, `tokens` [R, S] of each, prompts included. What comes
        late is long."""
        rows, count = finish_s.shape
        most = -(-count // int(sizes.min()))
        stops = np.minimum(sizes[:, None] * np.arange(most + 1), count)
        until = np.concatenate((np.zeros((rows, 1)), np.cumsum(tokens, axis=1)), axis=1)
        ready_s = np.take_along_axis(finish_s, stops[:, 1:] - 1, axis=1)
        place = np.arange(count) // sizes[:, None]
        return cls(ready_s, np.diff(stops), np.diff(np.take_along_axis(until, stops, axis=1)), place)


class StreamedStage:
    """What a stage makes of micro-batches on any number of replicas, which take `start_s` to start: by the first
    micro-batch, or ahead of it (`prewarmed` [R]). `late`: of its time, that generation takes longer on average."""

    def __init__(self, parts: Parts, cost: WorkCost, start_s: float, prewarmed: Flags, late: float = 0.0) -> None:
        self.parts, self.first_s = parts, cost.first_s
        self.start_s, self.ahead_s, self.late = start_s, start_s * prewarmed, late * prewarmed
        self.counts = np.count_nonzero(parts.sizes, axis=1)
        works = cost.call_s + cost.sample_s * parts.sizes + cost.token_s * parts.tokens
        self.works = np.where(parts.sizes > 0, works, 0.0)

    def follow(self, replicas: int, room_at_s: Array) -> Follower:
        """`room_at_s` [R]: when there is room for the replicas at the earliest. A replica is paid for from its start to
        its own last call's end, and at least until the last micro-batch is ready: before that, more calls may come.
        Started ahead it waits, on average, for a first one that comes later.
        """
        ready_s = self.parts.ready_s
        rows, count = ready_s.shape
        opened_s = np.maximum(np.maximum(ready_s[:, 0] - self.ahead_s, room_at_s), 0.0)
        begin_s = np.maximum(opened_s + self.start_s, ready_s[:, 0])
        # The replicas take turns: end_k = max(ready_k, end_{k - used}) + work_k, solved for each replica as
        # max_{i <= k} (ready_i - work before i) + work up to k.
        used = min(replicas, count)
        turns, works = np.maximum(ready_s, (begin_s + self.first_s)[:, None]), self.works
        if more := -count % used:  # without work, so that all have as many turns
            turns = np.concatenate((turns, np.full((rows, more), -np.inf)), axis=1)
            works = np.concatenate((works, np.zeros((rows, more))), axis=1)
        turns, works = turns.reshape(rows, -1, used), works.reshape(rows, -1, used)
        done = np.cumsum(works, axis=1)
        ends = np.maximum.accumulate(turns - done + works, axis=1) + done
        work_on = np.minimum(replicas, self.counts)
        last_s = np.maximum(ends[:, -1], ready_s[:, -1:]) * (np.arange(used) < work_on[:, None])
        done_s = ends.reshape(rows, -1)[:, :count]
        idle_s = self.late * ready_s[:, 0] * (opened_s < ready_s[:, 0])
        return Follower(
            work_on, begin_s, done_s.max(axis=1), last_s.sum(axis=1) - work_on * (opened_s - idle_s), done_s
        )


def micro_batches(samples: int) -> list[int]:
    """Sizes worth comparing: the whole batch, a 32nd and a 128th of it."""
    return sorted({max(1, -(-samples // parts)) for parts in (1, 32, 128)}, reverse=True)


def replica_counts(limit: int) -> list[int]:
    """Counts worth comparing: 1, 2, 3, 4, 6, powers of two from there up to `limit`, and the limit."""
    return sorted({n for n in (1, 2, 3, 4, 6, *(1 << k for k in range(3, limit.bit_length()))) if n <= limit} | {limit})
