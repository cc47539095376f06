"""Rooms in a pool by hand, and against a count of the GPUs that are free at every moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.room import Room


def take(room: Room, gpus: int, until_s: float) -> None:
    room.take(np.array([gpus]), np.array([until_s]))


def at_s(room: Room, gpus: list[int]) -> list[float]:
    return [float(s) for s in np.broadcast_to(room.at_s(gpus), (1, len(gpus)))[0]]


def test_room_is_what_is_not_taken_yet() -> None:
    room = Room.after(8, 5, np.array([[10.0]]))
    assert at_s(room, [3, 4, 8]) == [0.0, 10.0, 10.0]
    fewer = room.less(np.array([[0, 0]]), np.array([[2, 3]]), np.array([[20.0, 4.0]]))
    assert fewer.at_s([1, 2, 6, 7, 8]).tolist() == [[[0.0, 10.0, 10.0, 20.0, 20.0], [4.0, 4.0, 10.0, 10.0, 10.0]]]
    assert at_s(room, [3]) == [0.0]
    alone = Room.after(None, 5, np.array([[10.0]]))
    take(alone, 99, 1.0)
    assert at_s(alone, [1000]) == [0.0]


def test_room_promised_is_there_whenever_it_is_asked_for() -> None:
    """8 GPUs: 5 until 4 s, and 3 x 2 from 4 s on, gone at 10, 10 and 12 s. Whoever waits for those finds 2 at any time,
    though 3 are free until 4 s; more when all of them are gone, though 6 are free from 10 s on."""
    room = Room.after(8, 5, np.array([[4.0]]))
    room.promise(2, np.array([[10.0, 10.0, 12.0]]), np.array([4.0]))
    assert at_s(room, [1, 2, 3, 6, 8]) == [0.0, 0.0, 12.0, 12.0, 12.0]
    assert room.fits([2, 3]).tolist() == [[True, False]]
    take(room, 1, 20.0)
    assert room.fits([1, 2]).tolist() == [[True, False]]
    assert at_s(room, [1, 2, 8]) == [0.0, 12.0, 20.0]
    room.begun(np.array([11.0]))  # from then on they have what was promised: 5 are free beside the last of them
    assert at_s(room, [1, 2, 5, 6, 8]) == [0.0, 11.0, 11.0, 12.0, 20.0]


times = st.floats(0.5, 50.0)


@given(
    st.lists(times, min_size=1, max_size=4), st.lists(times, max_size=3), st.lists(st.integers(0, 3), max_size=3),
    times,
)  # fmt: skip
def test_room_is_free_for_good_from_when_no_moment_after_has_less(
    gone_s: list[float], wide_gone_s: list[float], takes: list[int], from_s: float
) -> None:
    """Pool of 12; replicas of 2, and promised ones of 3 beside them; then takes that go on longer than all of those."""
    pool = 12
    wide_s = [from_s + more for more in wide_gone_s][: (pool - sum(takes)) // 3]
    room = Room.after(pool, 2, np.sort([gone_s], axis=1))
    if wide_s:
        room.promise(3, np.array([wide_s]), np.array([from_s]))
    last_s = max([*gone_s, *wide_s])
    until_s = [last_s + 1.0 + k for k in range(len(takes))]
    for gpus, end_s in zip(takes, until_s, strict=True):
        take(room, gpus, end_s)
    ends = sorted({0.0, from_s, *gone_s, *wide_s, *until_s})

    def free(time_s: float, promised: bool) -> int:
        taken = sum(gpus for gpus, end_s in zip(takes, until_s, strict=True) if end_s > time_s)
        if promised:
            return pool - taken - (3 * len(wide_s) if wide_s and max(wide_s) > time_s else 0)
        narrow = 2 * sum(end_s > time_s for end_s in gone_s)
        return pool - taken - narrow - 3 * sum(end_s > time_s >= from_s for end_s in wide_s)

    for gpus in range(pool + 1):
        expected = max(
            next(t for k, t in enumerate(ends) if all(free(later, promised) >= gpus for later in ends[k:]))
            for promised in (False, True)
        )
        assert at_s(room, [gpus]) == [expected]
