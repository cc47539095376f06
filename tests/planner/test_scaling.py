"""The point of the curve for each goal, by hand; what cannot be met says by how much and what would."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.base import CurvePoint
from orchestrator.planner.scaling import Goal, Objective, Unmet, choose

CURVE = [
    CurvePoint(1, 100.0, 1.0, 100.0),
    CurvePoint(2, 60.0, 1.2, 120.0),
    CurvePoint(4, 40.0, 1.6, 160.0),
    CurvePoint(8, 36.0, 2.9, 290.0),
]


@pytest.mark.parametrize(("objective", "replicas"), [("cost", 1), ("speed", 8), ("knee", 4)])
def test_each_objective_picks_its_point(objective: Objective, replicas: int) -> None:
    assert choose(CURVE, Goal(objective)).replicas == replicas


def test_deadline_and_budget_bound_the_choice() -> None:
    assert choose(CURVE, Goal("cost", deadline_s=50)).replicas == 4
    assert choose(CURVE, Goal("speed", budget_usd=1.3)).replicas == 2


def test_an_unmet_deadline_says_by_how_much_and_what_would() -> None:
    with pytest.raises(
        Unmet, match=r"deadline of 30 s .* 36 s with 8 replicas, 6 s \(20 %\) too late; .*deadline_s >= 36"
    ):
        choose(CURVE, Goal("cost", deadline_s=30))


def test_an_unmet_budget_says_by_how_much_and_what_would() -> None:
    with pytest.raises(Unmet, match=r"budget of 0.5 \$ .* 1 \$ with 1 replicas, 0.5 \$ \(100 %\) too much; .* >= 1"):
        choose(CURVE, Goal("speed", budget_usd=0.5))
    with pytest.raises(Unmet, match=r"deadline_s >= 60 would meet it \(2 replicas\)"):
        choose(CURVE, Goal("cost", deadline_s=50, budget_usd=1.3))


def test_goals_are_checked() -> None:
    with pytest.raises(ValueError, match="objective is 'fast'"):
        Goal("fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="deadline_s is 0"):
        Goal(deadline_s=0)
    with pytest.raises(ValueError, match="no points"):
        choose([], Goal())


def test_what_is_late_counts_as_dearer() -> None:
    """Within the deadline cost decides, beyond it the less late: 20 % late is more than four times as dear."""
    goal = Goal("cost", deadline_s=10.0)
    assert goal.rank(10.0, 3.0) == (3.0, 10.0)
    assert goal.rank(4.0, 3.0) < goal.rank(10.0, 3.0) < goal.rank(9.0, 3.5)
    assert goal.rank(12.0, 1.0)[0] == pytest.approx(1.2**8)
    assert goal.rank(11.0, 2.0) < goal.rank(13.0, 1.0)
    many = goal.rank(np.array([10.0, 12.0]), np.array([3.0, 1.0]))
    np.testing.assert_allclose(many[0], [3.0, 1.2**8])


def test_with_a_limit_plans_between_time_and_cost_are_looked_at_too() -> None:
    assert Goal("speed").ways() == (Goal("speed"),)
    limited = Goal("cost", deadline_s=10.0)
    ways = limited.ways()
    assert ways[0] == limited
    assert {Goal("cost"), Goal("knee"), Goal("speed")} <= set(ways)
    # Twice as fast for 15 % more: worth it to who gives 20 % of cost for all of time, not to who looks at cost alone.
    light = next(goal for goal in ways if goal.weight == 0.2)
    assert light.rank(5.0, 1.14) < light.rank(10.0, 1.0) < light.rank(5.0, 1.16)
