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


def follow(
    finish_s: Array, mean_tokens: float, cost: WorkCost, *, micro_batch: int, replicas: int, start_s: float,
    prewarmed: bool, room_at_s: float = 0.0,
) -> Follower:  # fmt: skip
    """A stage on `replicas` replicas that take `start_s` to start: by the first micro-batch, or ahead of it.

    `finish_s` [S] ascending: when samples are finished; a micro-batch is ready with its last. `room_at_s`: when there
    is room for the replicas at the earliest. A replica is paid for from its start to its own last call's end, and at
    least until the last micro-batch is ready: before that, more calls may come.
    """
    count = len(finish_s)
    stops = np.append(np.arange(micro_batch, count, micro_batch), count)
    ready = finish_s[stops - 1]
    sizes = np.diff(np.concatenate(([0], stops)))
    used = min(replicas, len(sizes))
    opened = max(float(ready[0]) - (start_s if prewarmed else 0.0), room_at_s, 0.0)
    begin = max(opened + start_s, float(ready[0]))
    # Equal work goes to the replicas in turn: end_k = max(ready_k, end_{k - used}) + work, solved for each replica as
    # max_{i <= k} (ready_i - i work) + (k + 1) work.
    work_s = cost.work_s(micro_batch, micro_batch * mean_tokens)
    rounds = -(-len(sizes) // used)
    turns = np.full(rounds * used, -np.inf)
    turns[: len(sizes)] = np.maximum(ready, begin)
    turn = np.arange(rounds)[:, None]
    ends = (np.maximum.accumulate(turns.reshape(rounds, used) - turn * work_s, axis=0) + (turn + 1) * work_s).ravel()
    ends = ends[: len(sizes)]
    ends[-1] += cost.work_s(sizes[-1], sizes[-1] * mean_tokens) - work_s
    last_ready = float(ready[-1])
    paid_s = float(np.maximum(ends[-used:], last_ready).sum()) - used * opened
    return Follower(used, begin, float(ends.max()), paid_s, np.repeat(ends, sizes))


def micro_batches(samples: int) -> list[int]:
    """Sizes worth comparing: from the whole batch to a 128th of it."""
    return sorted({max(1, -(-samples // parts)) for parts in (1, 16, 32, 128)}, reverse=True)


def replica_counts(limit: int) -> list[int]:
    """Counts worth comparing: 1, 2, 3, 4, 6, powers of two from there up to `limit`, and the limit."""
    return sorted({n for n in (1, 2, 3, 4, 6, *(1 << k for k in range(3, limit.bit_length()))) if n <= limit} | {limit})
