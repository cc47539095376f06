"""How many replicas: the point of T(N), C(N) that the user asked for.

    cost     the cheapest point (that meets the deadline, where one is set)
    speed    the fastest point (within the budget, where one is set)
    knee     the least T * C: the point after which 1 % more money buys less than 1 % of time

RLHFless weighs lam T / T_ref + (1 - lam) C / C_ref; its lam and references are not published, and fixed weights do not
carry over between workloads. T * C has no unit to normalise and no weight to choose: its level lines are those of equal
relative exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import CurvePoint

EXCHANGES = (0.2, 0.5, 1.0)
"""Per cent of cost that one per cent of time is worth, where a deadline or budget is to be met."""
LATE = 8
ROUNDING = 1e-9
T = TypeVar("T", float, npt.NDArray[np.float64])
Objective = Literal["cost", "speed", "knee"]
OBJECTIVES: tuple[Objective, ...] = ("cost", "speed", "knee")


class Unmet(ValueError):
    """A deadline or budget that no point of the curve meets; says by how much, and what would meet it."""


@dataclass(frozen=True)
class Goal:
    """What the user asked for. `deadline_s` and `budget_usd` are for one step."""

    objective: Objective = "knee"
    deadline_s: float | None = None
    budget_usd: float | None = None
    weight: float = 1.0
    """Of time in the knee: the least T^weight x C."""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r} (wants one of {', '.join(OBJECTIVES)})")
        for name in ("deadline_s", "budget_usd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value} (wants more than 0)")

    def rank(self, time_s: T, cost: T) -> tuple[T, T]:
        """Smaller is better: what the objective minimises, then what decides between equals; elementwise of arrays.
        What is later than a deadline counts as dearer, and the more so the later.
        """
        if self.deadline_s is not None:
            late = time_s / self.deadline_s
            cost = cost * ((late + 1.0 + abs(late - 1.0)) / 2) ** LATE  # max(1, late)
        if self.objective == "speed":
            return time_s, cost
        return (cost, time_s) if self.objective == "cost" else (time_s**self.weight * cost, cost)

    def best(self, time_s: npt.NDArray[np.float64], cost: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Where in the last axis the best is, the first of equals. What differs by rounding is equal."""
        first, second = self.rank(time_s, cost)
        near = first <= first.min(axis=-1, keepdims=True) * (1 + ROUNDING)
        found: npt.NDArray[np.int64] = np.where(near, second, np.inf).argmin(axis=-1)
        return found

    def ways(self) -> tuple[Goal, ...]:
        """Goals whose best plans are those to choose from: where there is a deadline or a budget, also the best for
        time, for cost, and for several exchanges of one for the other.
        """
        if self.deadline_s is None and self.budget_usd is None:
            return (self,)
        between = [Goal("knee", weight=weight) for weight in EXCHANGES]
        return (self, Goal("cost"), *between, Goal("speed"))


def choose(curve: Sequence[CurvePoint], goal: Goal) -> CurvePoint:
    """The point of the curve that meets the goal best. Ties go to the lower cost, then to fewer replicas.

    Raises Unmet.
    """
    if not curve:
        raise ValueError("no points to choose from")
    allowed = [p for p in curve if goal.deadline_s is None or p.time_s <= goal.deadline_s]
    if not allowed:
        raise Unmet(_late(curve, goal))
    within = [p for p in allowed if goal.budget_usd is None or p.cost_usd <= goal.budget_usd]
    if not within:
        raise Unmet(_dear(curve, allowed, goal))
    return min(within, key=lambda p: (*goal.rank(p.time_s, p.cost_usd), p.replicas))


def _late(curve: Sequence[CurvePoint], goal: Goal) -> str:
    assert goal.deadline_s is not None
    best = min(curve, key=lambda p: (p.time_s, p.cost_usd))
    over = best.time_s - goal.deadline_s
    return (
        f"deadline of {goal.deadline_s:.4g} s cannot be met: the fastest is {best.time_s:.4g} s with {best.replicas} "
        f"replicas, {over:.4g} s ({100 * over / goal.deadline_s:.0f} %) too late; set deadline_s >= {best.time_s:.4g}, "
        "lower max_response_length, or allow more replicas"
    )


def _dear(curve: Sequence[CurvePoint], allowed: Sequence[CurvePoint], goal: Goal) -> str:
    assert goal.budget_usd is not None
    best = min(allowed, key=lambda p: (p.cost_usd, p.time_s))
    over = best.cost_usd - goal.budget_usd
    line = (
        f"budget of {goal.budget_usd:.4g} $ cannot be met: the cheapest is {best.cost_usd:.4g} $ with {best.replicas} "
        f"replicas, {over:.4g} $ ({100 * over / goal.budget_usd:.0f} %) too much"
    )
    cheap = [p for p in curve if p.cost_usd <= goal.budget_usd]
    if cheap:
        fastest = min(cheap, key=lambda p: p.time_s)
        return f"{line}; deadline_s >= {fastest.time_s:.4g} would meet it ({fastest.replicas} replicas)"
    return f"{line}; set budget_usd >= {min(p.cost_usd for p in curve):.4g}"
