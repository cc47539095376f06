"""Prewarming."""

from __future__ import annotations

import pytest

from orchestrator.planner.prewarm import prewarm_at_s


def test_prewarm_is_ahead_by_a_start_that_rarely_takes_longer() -> None:
    assert prewarm_at_s(30.0, [4.0] * 9 + [14.0], quantile=0.9) == pytest.approx(25.0)
    assert prewarm_at_s(3.0, [10.0]) == 0.0
    assert prewarm_at_s(30.0, []) == 30.0
