"""Fed trainers by hand and by brute force; rooms in a pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.latency import WorkCost
from orchestrator.planner.training import EARLY, Batch, Room, at_once, fed, rank_counts


def batch(ready: list[float], tokens: list[float], longest: float = 0.0) -> Batch:
    return Batch(np.array(ready), np.ones(len(ready)), np.array(tokens), longest)


def test_a_fed_gang_begins_as_late_as_costs_no_time() -> None:
    """Groups at 1, 2 and 10 s, 4 s of one rank each: two ranks need 6 s. 10 + 2 is the end in any case, so 6 is early
    enough; loading and publishing take 1 s each, a start 3."""
    load = batch([2.0, 1.0, 10.0], [4.0, 4.0, 4.0])
    first = fed(load, WorkCost(2.0, 0.0, 1.0), [2], start_s=3.0, rooms_s=[0.0], paces=(1.0,)).trainer(0, 0)
    assert (first.open_s, first.call_s, first.end_s, first.fed) == (2.0, 5.0, 13.0, True)
    assert first.replica_s == 22.0
    late = fed(load, WorkCost(2.0, 0.0, 1.0), [2], start_s=3.0, rooms_s=[6.0], paces=(1.0,)).trainer(0, 0)
    assert (late.open_s, late.call_s, late.end_s) == (6.0, 9.0, 17.0)


def test_what_a_gang_shares_of_its_call_is_divided_among_its_ranks() -> None:
    """One group of 12 s of one rank at 1 s; 8 s of state to read and as much to write, 2 s of every call."""
    cost = WorkCost(2.0, 0.0, 1.0, shared_s=16.0)
    assert (cost.own_s(1), cost.own_s(4), cost.ranked_s(1, 12, 4)) == (18.0, 6.0, 9.0)
    two, four = (fed(batch([1.0], [12.0]), cost, [2, 4], start_s=0.0, rooms_s=[0.0, 0.0], paces=(1.0,)).trainer(k, 0)
                 for k in (0, 1))  # fmt: skip
    assert (two.call_s, two.end_s) == (0.0, 5.0 + 6.0 + 5.0)
    assert (four.call_s, four.end_s) == (0.0, 3.0 + 3.0 + 3.0)
    load = batch([1.0], [12.0])
    whole = at_once(
        load, cost, [4], ready_s=np.full(1, 1.0), start_s=0.0, rooms_s=[0.0], ahead=True, loads=True
    ).trainer(0, 0)
    assert whole.end_s == 9.0


def test_the_longest_sample_is_one_ranks_work() -> None:
    load = batch([1.0, 2.0], [6.0, 6.0], longest=5.0)
    found = fed(load, WorkCost(0.0, 0.0, 1.0), [12], start_s=0.0, rooms_s=[0.0], paces=(1.0,))
    assert found.trainer(0, 0).end_s == 7.0


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.floats(0.0, 30.0),
)
def test_a_fed_gang_ends_when_a_server_would(groups: list[tuple[float, float]], ranks: int, room_at_s: float) -> None:
    load = batch([r for r, _ in groups], [w for _, w in groups])
    found = fed(load, WorkCost(0.0, 0.0, 1.0), [ranks], start_s=0.0, rooms_s=[room_at_s], paces=(1.0,))
    for trainer in (found.trainer(0, k) for k in range(len(EARLY))):
        at_s = trainer.call_s
        for ready, work in sorted(groups):
            at_s = max(at_s, ready) + work / ranks
        assert trainer.end_s == pytest.approx(at_s)
        assert trainer.call_s >= room_at_s


def test_all_at_once_loads_before_the_samples_are_there() -> None:
    load, cost = batch([1.0, 9.0], [10.0, 10.0]), WorkCost(4.0, 0.0, 1.0)
    eager, alone = (
        at_once(
            load, cost, [2, 1], ready_s=np.full(2, 9.0), start_s=3.0, rooms_s=[0.0, 0.0], ahead=True, loads=True
        ).trainer(k, 0)
        for k in (0, 1)
    )
    assert alone.end_s == eager.end_s + 10.0
    assert (eager.open_s, eager.call_s, eager.end_s, eager.fed) == (4.0, 7.0, 21.0, True)
    started = at_once(
        load, cost, [2], ready_s=np.full(1, 9.0), start_s=3.0, rooms_s=[0.0], ahead=True, loads=False
    ).trainer(0, 0)
    assert (started.open_s, started.call_s, started.end_s, started.fed) == (6.0, 9.0, 23.0, False)
    cold = at_once(
        load, cost, [2], ready_s=np.full(1, 9.0), start_s=3.0, rooms_s=[10.0], ahead=True, loads=True
    ).trainer(0, 0)
    assert (cold.open_s, cold.call_s, cold.end_s, cold.fed) == (10.0, 13.0, 27.0, False)


def test_room_is_what_is_not_taken_yet() -> None:
    room = Room(8)
    room.take(5, 10.0)
    assert [room.at_s(n) for n in (3, 4, 8)] == [0.0, 10.0, 10.0]
    fewer = room.less(2, 20.0)
    assert [fewer.at_s(n) for n in (1, 2, 6, 7, 8)] == [0.0, 10.0, 10.0, 20.0, 20.0]
    assert room.at_s(3) == 0.0
    assert Room(None).less(99, 1.0).at_s(1000) == 0.0


def test_room_promised_is_there_whenever_it_is_asked_for() -> None:
    """8 GPUs: 5 until 4 s, and 3 x 2 from 4 s on, gone at 10, 10 and 12 s. Whoever waits for those finds 2 at any time,
    though 3 are free until 4 s; more when all of them are gone, though 6 are free from 10 s on."""
    room = Room(8)
    room.take(5, 4.0)
    room.promise(2, [10.0, 10.0, 12.0], 4.0)
    assert [room.at_s(n) for n in (1, 2, 3, 6, 8)] == [0.0, 0.0, 12.0, 12.0, 12.0]
    assert [room.fits(n) for n in (2, 3)] == [True, False]
    room.take(1, 20.0)
    assert [room.fits(n) for n in (1, 2)] == [True, False]
    assert [room.at_s(n) for n in (1, 2, 8)] == [0.0, 12.0, 20.0]
    room.begun(11.0)  # from then on they have what was promised: 5 are free beside the last of them
    assert [room.at_s(n) for n in (1, 2, 5, 6, 8)] == [0.0, 11.0, 11.0, 12.0, 20.0]


def test_rank_counts() -> None:
    assert rank_counts(4, 4) == [4]
    assert rank_counts(2, 16) == list(range(2, 17))
    assert rank_counts(1, 128)[0] == 1
    assert rank_counts(1, 128)[-1] == 128
    assert len(rank_counts(1, 128)) <= 16
