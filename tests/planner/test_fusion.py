"""Stages beside generation, by hand and against a loop over their micro-batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.fusion import Follower, Parts, StreamedStage, replica_counts
from orchestrator.planner.latency import WorkCost

Array = npt.NDArray[np.float64]


def follow(
    tokens: list[float],
    cost: WorkCost,
    size: int,
    start_s: float,
    *,
    ahead: bool,
    replicas: int,
    room_at_s: float = 0.0,
    late: float = 0.0,
) -> Follower:
    """Of samples that are finished at 1, 2, 3 and 10 s."""
    parts = Parts.of(np.array([[1.0, 2.0, 3.0, 10.0]]), np.array([tokens]), np.array([size]))
    stage = StreamedStage(parts, cost, start_s, prewarmed=np.array([ahead]), late=late)
    return stage.follow(replicas, np.array([room_at_s]))


def test_follow_by_hand() -> None:
    cost, none = WorkCost(1.0, 0.5, 0.0), [0.0] * 4
    whole = follow(none, cost, 4, 4.0, ahead=False, replicas=2)
    assert [whole.replicas, whole.begin_s, whole.end_s, whole.replica_s] == [1, 14.0, 17.0, 7.0]
    ahead = follow(none, cost, 4, 4.0, ahead=True, replicas=2)
    assert [ahead.begin_s, ahead.end_s, ahead.replica_s] == [10.0, 13.0, 7.0]
    halves = follow(none, cost, 2, 0.0, ahead=True, replicas=1)
    # 2 samples ready at 2 (2 s of work), 2 at 10: done at 12; the replica is paid for from 2 on.
    assert [halves.begin_s, halves.end_s, halves.replica_s] == [2.0, 12.0, 10.0]
    # The last two are longer: 2 s of work, then 2 + 3.
    longer = follow([0.0, 0.0, 1.0, 2.0], WorkCost(1.0, 0.5, 1.0), 2, 0.0, ahead=True, replicas=1)
    assert longer.done_s.tolist() == [[4.0, 15.0]]
    # A replica whose first call loads for 3 s works from 5 s on.
    loads = follow(none, WorkCost(1.0, 0.5, 0.0, first_s=3.0), 2, 0.0, ahead=True, replicas=1)
    assert (loads.begin_s.tolist(), loads.done_s.tolist()) == ([2.0], [[7.0, 12.0]])
    late = follow(none, cost, 2, 1.0, ahead=True, replicas=1, room_at_s=9.0)
    assert [late.begin_s, late.end_s] == [10.0, 14.0]


def test_what_is_started_ahead_is_paid_for_while_samples_are_late() -> None:
    """The whole batch at 10 s, which comes at 11.5 s on average; halves from 2 s on, which come at 2.3 s."""
    cost, none = WorkCost(1.0, 0.5, 0.0), [0.0] * 4
    assert follow(none, cost, 4, 4.0, ahead=True, replicas=2, late=0.15).replica_s == pytest.approx(7.0 + 1.5)
    assert follow(none, cost, 4, 4.0, ahead=False, replicas=2, late=0.15).replica_s == 7.0
    assert follow(none, cost, 4, 4.0, ahead=True, replicas=2, late=0.15, room_at_s=10.0).replica_s == 7.0
    halves = follow(none, cost, 2, 1.0, ahead=True, replicas=2, late=0.15)
    assert halves.replica_s == pytest.approx(18.0 + 4.0 - 2.0 + 2 * 0.3)


@given(
    st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 6), st.floats(0, 60),
    st.booleans(),
)  # fmt: skip
def test_replicas_take_turns_in_every_step_of_many(
    samples: int, sizes: list[int], replicas: int, room_at_s: float, prewarmed: bool
) -> None:
    rng = np.random.default_rng(samples * 31 + replicas)
    finish_s = np.sort(rng.uniform(0.0, 50.0, (len(sizes), samples)), axis=1)
    tokens, cost = rng.uniform(5.0, 40.0, finish_s.shape), WorkCost(0.3, 0.2, 0.01, first_s=1.5)
    parts = Parts.of(finish_s, tokens, np.array(sizes))
    found = StreamedStage(parts, cost, 2.0, np.full(len(sizes), prewarmed)).follow(
        replicas, np.full(len(sizes), room_at_s)
    )
    for row, size in enumerate(sizes):
        starts = range(0, samples, size)
        ready = [finish_s[row, min(k + size, samples) - 1] for k in starts]
        opened = max(ready[0] - (2.0 if prewarmed else 0.0), room_at_s)
        begin = max(opened + 2.0, ready[0])
        free = [begin + 1.5] * min(replicas, len(ready))
        done = []
        for k, start in enumerate(starts):
            part = tokens[row, start : start + size]
            worked = 0.3 + 0.2 * len(part) + 0.01 * float(part.sum())
            free[k % len(free)] = max(free[k % len(free)], ready[k]) + worked
            done.append(free[k % len(free)])
        assert found.replicas[row] == len(free)
        assert found.begin_s[row] == pytest.approx(begin)
        assert found.done_s[row, : len(done)] == pytest.approx(done)
        assert found.end_s[row] == pytest.approx(max(done))
        assert found.replica_s[row] == pytest.approx(sum(max(at, ready[-1]) - opened for at in free))
        assert parts.place[row].tolist() == [k // size for k in range(samples)]


def test_replica_counts_are_close_to_each_other_where_few_and_end_with_the_limit() -> None:
    assert replica_counts(12) == [1, 2, 3, 4, 6, 8, 12]
    assert replica_counts(64) == [1, 2, 3, 4, 6, 8, 16, 32, 64]
    assert replica_counts(1) == [1]
