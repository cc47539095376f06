"""The point of the curve for each goal, by hand; what cannot be met says by how much and what would."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.base import CurvePoint
from orchestrator.planner.scaling import EXCHANGES, Goal, Objective, Unmet, best, choose

CURVE = [
    CurvePoint(1, 100.0, 1.0, 100.0),
    CurvePoint(2, 60.0, 1.2, 120.0),
    CurvePoint(4, 40.0, 1.6, 160.0),
    CurvePoint(8, 36.0, 2.9, 290.0),
]


@pytest.mark.parametrize(("objective", "replicas"), [("cost", 1), ("speed", 8), ("knee", 4)])
def test_each_objective_picks_its_point(objective: Objective, replicas: int) -> None:
    assert CURVE[choose(CURVE, Goal(objective))].replicas == replicas


def test_deadline_and_budget_bound_the_choice() -> None:
    assert CURVE[choose(CURVE, Goal("cost", deadline_s=50))].replicas == 4
    assert CURVE[choose(CURVE, Goal("speed", budget_usd=1.3))].replicas == 2


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


def test_an_exchange_says_what_time_is_worth() -> None:
    """Twice as fast for 15 % more: worth it to who gives 30 % of cost for all of time, not to who gives nothing."""
    exchange, time_s = np.array(EXCHANGES), np.array([10.0, 5.0])
    for dearer, places in ((1.15, [0, 1, 1, 1]), (1.5, [0, 0, 1, 1]), (2.5, [0, 0, 0, 1])):
        cost = np.array([1.0, dearer])
        assert best(exchange, np.tile(time_s, (4, 1)), np.tile(cost, (4, 1))).tolist() == places
    assert best(exchange[:1], np.array([[3.0, 2.0, 2.0]]), np.ones((1, 3))).tolist() == [
        1
    ]  # time decides between equals
    assert best(exchange[3:], np.full((1, 2), 3.0), np.array([[2.0, 1.0]])).tolist() == [1]  # and cost
