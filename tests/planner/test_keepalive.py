"""Ski rental by hand and by its guarantee; prewarming; leases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.keepalive import keep, keep_for_s, prewarm_at_s


def test_without_history_one_start_is_kept_for() -> None:
    assert keep_for_s([], 7.0) == 7.0
    with pytest.raises(ValueError, match="start_s is -1"):
        keep_for_s([], -1.0)


def test_the_learned_distribution_decides_by_hand() -> None:
    # Idle 2, 2, 2, 50; start 10: wait 2 costs (2+2+2+2+10)/4 = 4.5; wait 0 costs 10; wait 50 costs 14.
    assert keep_for_s([2, 2, 2, 50], 10.0) == 2.0
    assert keep_for_s([50, 60], 10.0) == 0.0


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20), st.floats(0.1, 50))
def test_the_choice_is_the_best_fixed_wait(idle: list[float], start_s: float) -> None:
    def cost(wait: float) -> float:
        return float(np.mean([min(i, wait) + (start_s if i > wait else 0.0) for i in idle]))

    chosen = cost(keep_for_s(idle, start_s))
    assert chosen <= min(cost(w) for w in (0.0, start_s, *idle)) + 1e-9
    assert chosen <= 2 * np.mean([min(i, start_s) for i in idle]) + 1e-9  # the guarantee of ski rental


def test_keep_compares_idle_with_start_and_never_outlives_a_lease() -> None:
    assert keep(3.0, [], 5.0)
    assert not keep(6.0, [], 5.0)
    assert not keep(3.0, [50, 60], 5.0)  # history says that it mostly waits long
    assert not keep(3.0, [], 5.0, lease_left_s=2.0)
    assert keep(3.0, [], 5.0, lease_left_s=4.0)


def test_prewarm_is_ahead_by_a_start_that_rarely_takes_longer() -> None:
    assert prewarm_at_s(30.0, [4.0] * 9 + [14.0], quantile=0.9) == pytest.approx(25.0)
    assert prewarm_at_s(3.0, [10.0]) == 0.0
    assert prewarm_at_s(30.0, []) == 30.0
