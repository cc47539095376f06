"""Fed trainers by hand and by brute force."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.latency import WorkCost
from orchestrator.planner.training import EARLY, Batch, Gangs, Trainer, at_once, rank_counts, streamed

Array = npt.NDArray[np.float64]


def batch(ready: list[float], tokens: list[float], longest: float = 0.0) -> Batch:
    """Of one step."""
    return Batch(np.array([ready]), np.ones(len(ready)), np.array(tokens), longest, np.array([max(ready)]))


def nth(gangs: Gangs, load: Batch, ranks: int = 0, begin: int = 0) -> Trainer:
    """Of the first step, after the first way to place others."""
    return Gangs(*(column[:, 0, ranks, begin] for column in gangs.columns())).trainer(0, load)


def at(*rooms_s: float) -> Array:
    """When there is room for each number of ranks, in one step and after one way to place others."""
    return np.array([[rooms_s]])


def test_a_fed_gang_begins_as_late_as_costs_no_time() -> None:
    """Groups at 1, 2 and 10 s, 4 s of one rank each: two ranks need 6 s. 10 + 2 is the end in any case, so 6 is early
    enough; loading and publishing take 1 s each, a start 3."""
    load = batch([2.0, 1.0, 10.0], [4.0, 4.0, 4.0])
    first = nth(streamed(load, WorkCost(2.0, 0.0, 1.0), [2], start_s=3.0, rooms_s=at(0.0), paces=(1.0,)), load)
    assert (first.open_s, first.call_s, first.end_s, first.streamed) == (2.0, 5.0, 13.0, True)
    assert first.replica_s == 22.0
    late = nth(streamed(load, WorkCost(2.0, 0.0, 1.0), [2], start_s=3.0, rooms_s=at(6.0), paces=(1.0,)), load)
    assert (late.open_s, late.call_s, late.end_s) == (6.0, 9.0, 17.0)


def test_what_a_gang_shares_of_its_call_is_divided_among_its_ranks() -> None:
    """One group of 12 s of one rank at 1 s; 8 s of state to read and as much to write, 2 s of every call."""
    cost = WorkCost(2.0, 0.0, 1.0, shared_s=16.0)
    assert (cost.own_s(1), cost.own_s(4), cost.ranked_s(1, 12, 4)) == (18.0, 6.0, 9.0)
    load = batch([1.0], [12.0])
    gangs = streamed(load, cost, [2, 4], start_s=0.0, rooms_s=at(0.0, 0.0), paces=(1.0,))
    two, four = (nth(gangs, load, k) for k in (0, 1))
    assert (two.call_s, two.end_s) == (0.0, 5.0 + 6.0 + 5.0)
    assert (four.call_s, four.end_s) == (0.0, 3.0 + 3.0 + 3.0)
    whole = at_once(
        load, cost, [4], ready_s=np.ones((1, 1)), start_s=0.0, rooms_s=at(0.0), ahead=np.array([True]), loads=True
    )
    assert nth(whole, load).end_s == 9.0


def test_the_longest_sample_is_one_ranks_work() -> None:
    load = batch([1.0, 2.0], [6.0, 6.0], longest=5.0)
    found = streamed(load, WorkCost(0.0, 0.0, 1.0), [12], start_s=0.0, rooms_s=at(0.0), paces=(1.0,))
    assert nth(found, load).end_s == 7.0


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.floats(0.0, 30.0),
)
def test_a_fed_gang_ends_when_a_server_would(groups: list[tuple[float, float]], ranks: int, room_at_s: float) -> None:
    load = batch([r for r, _ in groups], [w for _, w in groups])
    found = streamed(load, WorkCost(0.0, 0.0, 1.0), [ranks], start_s=0.0, rooms_s=at(room_at_s), paces=(1.0,))
    for trainer in (nth(found, load, 0, k) for k in range(len(EARLY))):
        at_s = trainer.call_s
        for ready, work in sorted(groups):
            at_s = max(at_s, ready) + work / ranks
        assert trainer.end_s == pytest.approx(at_s)
        assert trainer.call_s >= room_at_s


def test_all_at_once_loads_before_the_samples_are_there() -> None:
    load, cost = batch([1.0, 9.0], [10.0, 10.0]), WorkCost(4.0, 0.0, 1.0)
    ready_s = np.full((1, 1), 9.0)
    both = at_once(
        load, cost, [2, 1], ready_s=ready_s, start_s=3.0, rooms_s=at(0.0, 0.0), ahead=np.array([True]), loads=True
    )
    eager, alone = nth(both, load, 0), nth(both, load, 1)
    assert alone.end_s == eager.end_s + 10.0
    assert (eager.open_s, eager.call_s, eager.end_s, eager.streamed) == (4.0, 7.0, 21.0, True)
    started = nth(
        at_once(load, cost, [2], ready_s=ready_s, start_s=3.0, rooms_s=at(0.0), ahead=np.array([True]), loads=False),
        load,
    )
    assert (started.open_s, started.call_s, started.end_s, started.streamed) == (6.0, 9.0, 23.0, False)
    cold = nth(
        at_once(load, cost, [2], ready_s=ready_s, start_s=3.0, rooms_s=at(10.0), ahead=np.array([True]), loads=True),
        load,
    )
    assert (cold.open_s, cold.call_s, cold.end_s, cold.streamed) == (10.0, 13.0, 27.0, False)


def test_a_gang_that_is_started_ahead_is_paid_for_while_samples_are_late() -> None:
    """Two ranks, opened at 6 s for samples at 9 s that come 0.1 of that later on average: 17 s each, and 0.9."""
    load, ready_s = batch([1.0, 9.0], [10.0, 10.0]), np.full((1, 1), 9.0)
    for ahead, room_s, paid_s in ((True, 0.0, 2 * 17.9), (False, 0.0, 2 * 17.0), (True, 9.0, 2 * 17.0)):
        found = at_once(
            load, WorkCost(4.0, 0.0, 1.0), [2], ready_s=ready_s, start_s=3.0, rooms_s=at(room_s),
            ahead=np.array([ahead]), loads=False, late=0.1,
        )  # fmt: skip
        assert found.mean_replica_s.item() == pytest.approx(paid_s)
        assert found.replica_s.item() == 2 * 17.0


def test_rank_counts() -> None:
    assert rank_counts(4, 4) == [4]
    assert rank_counts(2, 16) == list(range(2, 17))
    assert rank_counts(1, 128)[0] == 1
    assert rank_counts(1, 128)[-1] == 128
    assert len(rank_counts(1, 128)) <= 16
