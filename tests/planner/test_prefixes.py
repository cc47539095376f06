"""Tokens to compute against a brute-force set of prefixes; the counterexample to the monotone search; families."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.prefixes import Prefixes

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def distinct(sequences: list[list[int]]) -> int:
    """Distinct prefixes, the empty one not counted: the tokens that a replica computes."""
    return len({tuple(s[: k + 1]) for s in sequences for k in range(len(s))})


def test_the_count_of_prefixes_is_not_monotone_in_savings() -> None:
    # seeds: samples aX, aY have one distinct prefix of length 1 and two of length 2: 3 tokens to compute, not 2 or 4.
    a, x, y = 1, 2, 3
    assert Prefixes([[a], [a]]).tokens(np.array([0, 1])) == 1
    assert Prefixes([[a, x], [a, y]]).tokens(np.array([0, 1])) == 3


def test_grpo_with_three_samples_avoids_two_thirds() -> None:
    rows, shard = np.repeat(np.arange(4), 3), np.zeros(12, np.int64)
    assert 3 * int(Prefixes([[k] * 90 for k in range(4)]).tokens_of(rows, shard, 1)[0]) == 4 * 3 * 90


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=8))
def test_the_head_is_the_longest_common_prefix(sequences: list[list[int]]) -> None:
    expected = 0
    while all(len(s) > expected and s[expected] == sequences[0][expected] for s in sequences):
        expected += 1
    assert Prefixes(sequences).head == expected


@given(st.data(), SEQUENCES.filter(len))
def test_any_shard_is_counted_by_its_distinct_prefixes(data: st.DataObject, sequences: list[list[int]]) -> None:
    rows = data.draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, unique=True))
    assert Prefixes(sequences).tokens(np.array(rows)) == distinct([sequences[row] for row in rows])


def test_families_share_more_than_all_do() -> None:
    everyone, math, code = list(range(20)), list(range(100, 150)), list(range(200, 250))
    own = [[900 + k] * 5 for k in range(6)]
    heads = [everyone + math, everyone + code, everyone + math, everyone, everyone + code, everyone + math]
    found = Prefixes([head + tail for head, tail in zip(heads, own, strict=True)]).families().tolist()
    assert found[0] == found[2] == found[5]
    assert found[1] == found[4]
    assert len(set(found)) == 3
    assert len(set(Prefixes([everyone + tail for tail in own]).families().tolist())) == 6  # nobody shares more
