"""Reward and reference beside generation: how many finished samples to hand on at a time, on how many replicas.

RLHFuse's sample-level fusion. Finished samples are scored while the tail still generates, so that the step ends sooner;
but a replica is paid for from its first call to its last, and idle while it waits for the next micro-batch. Both are
computed for a few micro-batch sizes and replica counts, by list scheduling over the predicted finish times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.planner.latency import WorkCost

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Follower:
    """A stage that works on finished samples: from its first call to its last, and what its replicas are paid for."""

    replicas: int
    begin_s: float
    end_s: float
    replica_s: float
    done_s: Array
    """When each sample is done with, in the order in which they were finished. [S]"""


class Stream:
    """Micro-batches of finished samples, and what a stage makes of them on any number of replicas, which take `start_s`
    to start: by the first micro-batch, or ahead of it (`prewarmed`).

    `finish_s` [S] ascending: when samples are finished, `tokens` [S] of each, prompts included; a micro-batch is ready
    with its last. What comes late is long.
    """

    def __init__(
        self, finish_s: Array, tokens: Array, cost: WorkCost, micro_batch: int, start_s: float, prewarmed: bool
    ) -> None:
        count = len(finish_s)
        starts = np.arange(0, count, micro_batch)
        stops = np.append(starts[1:], count)
        self.ready, self.sizes = finish_s[stops - 1], stops - starts
        self.start_s, self.ahead_s, self.first_s = start_s, start_s if prewarmed else 0.0, cost.first_s
        self.works = cost.call_s + cost.sample_s * self.sizes + cost.token_s * np.add.reduceat(tokens, starts)
        self.all_s = float(self.works.sum())

    def _opened_s(self, room_at_s: float) -> float:
        return max(float(self.ready[0]) - self.ahead_s, room_at_s, 0.0)

    def least(self, replicas: int, room_at_s: float) -> tuple[float, float]:
        """No earlier end, and no fewer replica-seconds, than these."""
        used = min(replicas, len(self.sizes))
        opened, last_ready = self._opened_s(room_at_s), float(self.ready[-1])
        begin = max(opened + self.start_s, float(self.ready[0])) + self.first_s
        end_s = max(begin + self.all_s / used, last_ready + float(self.works[-1]))
        return end_s, max(used * (last_ready - opened), self.all_s)

    def follow(self, replicas: int, room_at_s: float = 0.0) -> Follower:
        """`room_at_s`: when there is room for the replicas at the earliest. A replica is paid for from its start to its
        own last call's end, and at least until the last micro-batch is ready: before that, more calls may come.
        """
        used = min(replicas, len(self.sizes))
        opened = self._opened_s(room_at_s)
        begin = max(opened + self.start_s, float(self.ready[0]))
        # The replicas take turns: end_k = max(ready_k, end_{k - used}) + work_k, solved for each replica as
        # max_{i <= k} (ready_i - work before i) + work up to k.
        rounds = -(-len(self.sizes) // used)
        turns, works = np.full(rounds * used, -np.inf), np.zeros(rounds * used)
        turns[: len(self.sizes)] = np.maximum(self.ready, begin + self.first_s)
        works[: len(self.sizes)] = self.works
        done = np.cumsum(works.reshape(rounds, used), axis=0)
        ends = (np.maximum.accumulate(turns.reshape(rounds, used) - done + works.reshape(rounds, used)) + done).ravel()
        ends = ends[: len(self.sizes)]
        paid_s = float(np.maximum(ends[-used:], self.ready[-1]).sum()) - used * opened
        return Follower(used, begin, float(ends.max()), paid_s, np.repeat(ends, self.sizes))


def micro_batches(samples: int) -> list[int]:
    """Sizes worth comparing: from the whole batch to a 128th of it."""
    return sorted({max(1, -(-samples // parts)) for parts in (1, 16, 32, 128)}, reverse=True)


def replica_counts(limit: int) -> list[int]:
    """Counts worth comparing: 1, 2, 3, 4, 6, powers of two from there up to `limit`, and the limit."""
    return sorted({n for n in (1, 2, 3, 4, 6, *(1 << k for k in range(3, limit.bit_length()))) if n <= limit} | {limit})
