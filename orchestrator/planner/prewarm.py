"""What is started ahead of its use, so that its start is over when it is."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from orchestrator.planner.arrays import Array, Flags, Numbers
from orchestrator.planner.base import GENERATE
from orchestrator.planner.case import Case
from orchestrator.planner.training import Gangs


def prewarm_at_s(first_use_s: float, start_seconds: Sequence[float], *, quantile: float = 0.9) -> float:
    """When to start a function that is first used at `first_use_s`: ahead by a cold start that rarely takes longer."""
    if not len(start_seconds):
        return max(0.0, first_use_s)
    return max(0.0, first_use_s - float(np.quantile(np.asarray(start_seconds, dtype=np.float64), quantile)))


def prewarmed(
    case: Case, exchange: Array, functions: Collection[str], trainers: Mapping[str, Gangs], generate_gpus: Numbers
) -> dict[str, Flags]:  # fmt: skip
    """What is started ahead: the next step's generate only where the pool will have room for it beside the trainers
    that are there in the end. [R] each
    """
    ahead = case.ahead(exchange) & (not case.policy.keep)
    costs, found = case.costs, dict.fromkeys(functions, ahead)
    for name, t in trainers.items():
        found[name] = ahead & (t.open_s < t.call_s)
    if costs.pool_gpus is not None and trainers:
        last_s = np.max([t.end_s for t in trainers.values()], axis=0) - costs.start_s[GENERATE]
        there = np.sum([t.counts * (t.end_s > last_s) for t in trainers.values()], axis=0)
        found[GENERATE] = ahead & (generate_gpus + costs.rank_gpus * there <= costs.pool_gpus)
    return found
