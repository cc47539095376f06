"""The point of the front that the user asked for.

    cost     the cheapest (that meets the deadline, where one is set)
    speed    the fastest (within the budget, where one is set)
    knee     the least T * C: beyond it 1 % more money buys less than 1 % of time

All choose from the same points, which are worked out for several exchanges of cost for time: none is ever worse on both
axes than what another objective would take (docs/decisions/0022-one-front.md).

RLHFless weighs lam T / T_ref + (1 - lam) C / C_ref; its lam and references are not published, and fixed weights do not
carry over between workloads. T^w C has no unit to normalise: its level lines are those of equal relative exchange.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from orchestrator.planner.arrays import Array, Numbers
from orchestrator.planner.base import CurvePoint

EXCHANGES = (1e-3, 0.3, 1.0, 1e3)
"""Per cent of cost that one per cent of time is worth: next to nothing, some, as much, next to everything."""
HURRY = 0.1
"""An exchange below it gives nothing for time."""
ROUNDING = 1e-9
Objective = Literal["cost", "speed", "knee"]
OBJECTIVES: tuple[Objective, ...] = ("cost", "speed", "knee")


def worth(exchange: Array | float, time_s: Array, cost: Array) -> Array:
    """The logarithm of T^w C, over the larger of its exponents: smaller is better. All of one shape, or broadcast."""
    found: Array = (exchange * np.log(np.maximum(time_s, 1e-12)) + np.log(np.maximum(cost, 1e-12))) / np.maximum(
        1.0, exchange
    )
    return found


def best(exchange: Array, time_s: Array, cost: Array) -> Numbers:
    """Where in the last axis the best is, the first of equals. What differs by rounding is equal. `exchange` [...]"""
    value = worth(exchange[..., None], time_s, cost)
    found: Numbers = (value <= value.min(axis=-1, keepdims=True) + ROUNDING).argmax(axis=-1)
    return found


class Unmet(ValueError):
    """A deadline or budget that no point of the curve meets; says by how much, and what would meet it."""


@dataclass(frozen=True)
class Goal:
    """What the user asked for. `deadline_s` and `budget_usd` are for one step."""

    objective: Objective = "knee"
    deadline_s: float | None = None
    budget_usd: float | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r} (wants one of {', '.join(OBJECTIVES)})")
        for name in ("deadline_s", "budget_usd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value} (wants more than 0)")

    def rank(self, time_s: float, cost: float) -> tuple[float, float]:
        """Smaller is better: what the objective minimises, then what decides between equals."""
        if self.objective == "speed":
            return time_s, cost
        return (cost, time_s) if self.objective == "cost" else (time_s * cost, cost)


def choose(curve: Sequence[CurvePoint], goal: Goal) -> int:
    """The place of the point that meets the goal best. Ties go to the lower cost, then to fewer replicas.

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
    return curve.index(min(within, key=lambda p: (*goal.rank(p.time_s, p.cost_usd), p.replicas)))


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
