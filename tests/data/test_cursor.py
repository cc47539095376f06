"""The data cursor: exact across resumes and epochs, for any batch size."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.base.errors import DataError
from orchestrator.job.data import Cursor, next_batch, shuffled

COUNTS = st.integers(1, 40)


@given(count=COUNTS, sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), seed=st.integers(0, 2**63))
def test_batches_of_any_sizes_cut_one_endless_sequence(count: int, sizes: list[int], seed: int) -> None:
    """Drawing in pieces, each resumed from JSON, is the same as drawing all at once."""
    whole, end = next_batch(Cursor.start(seed), count, sum(sizes))
    cursor, drawn = Cursor.start(seed), list[int]()
    for size in sizes:
        batch, cursor = next_batch(Cursor.from_json(cursor.to_json()), count, size)
        assert len(batch) == size
        drawn += batch
    assert (drawn, cursor) == (whole, end)
    assert cursor.epoch * count + cursor.position == sum(sizes)


@given(count=COUNTS, epochs=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_epoch_has_every_row_once(count: int, epochs: int, seed: int) -> None:
    drawn, cursor = next_batch(Cursor.start(seed), count, count * epochs)
    for epoch in range(epochs):
        assert Counter(drawn[epoch * count : (epoch + 1) * count]) == Counter(range(count))
    assert cursor == Cursor(epochs, 0, seed)


def test_orders_differ_by_epoch_and_seed_and_never_change() -> None:
    first, cursor = next_batch(Cursor.start(7), 100, 100)
    second, _ = next_batch(cursor, 100, 100)
    other, _ = next_batch(Cursor.start(8), 100, 100)
    assert len({tuple(first), tuple(second), tuple(other)}) == 3
    assert list(shuffled(8, 7, "epoch 0")) == PINNED, "a job that began before would go on with other rows"


PINNED = [2, 0, 6, 1, 7, 5, 4, 3]


def test_unshuffled_is_file_order_over_and_over() -> None:
    drawn, cursor = next_batch(Cursor.start(0), 3, 7, shuffle=False)
    assert (drawn, cursor) == ([0, 1, 2, 0, 1, 2, 0], Cursor(2, 1, 0))


def test_a_data_set_that_shrank_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 5 rows, the job's cursor is at row 5 of epoch 2: it was changed"):
        next_batch(Cursor(2, 5, 0), 5, 1)


@pytest.mark.parametrize("value", [None, {}, {"epoch": 1, "position": "x", "seed": 0}, [1, 2, 3]])
def test_what_is_no_cursor_is_refused(value: object) -> None:
    with pytest.raises(DataError, match="want epoch, position and seed"):
        Cursor.from_json(value)
