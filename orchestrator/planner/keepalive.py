"""What stays between a step and the next, and what is started ahead of its use.

Keep a function's replicas over an idle time, or let them go and start them again: ski rental (Karlin et al.,
Competitive snoopy caching, 1988). Keeping costs its idle seconds, letting go a cold start; a step's idle times are
predicted, so the cheaper is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import GENERATE
from orchestrator.planner.case import Case
from orchestrator.planner.training import Gangs

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def prewarm_at_s(first_use_s: float, start_seconds: Sequence[float], *, quantile: float = 0.9) -> float:
    """When to start a function that is first used at `first_use_s`: ahead by a cold start that rarely takes longer."""
    if not len(start_seconds):
        return max(0.0, first_use_s)
    return max(0.0, first_use_s - float(np.quantile(np.asarray(start_seconds, dtype=np.float64), quantile)))


def kept(
    case: Case, replicas: Mapping[str, Numbers], paid_s: Mapping[str, Array], time_s: Array
) -> dict[str, Flags]:  # fmt: skip
    """Held over the step's idle time when that is shorter than the cold start it saves, on average of a replica; of R
    steps. In a pool that others need, only where all of them fit beside each other. [R] each
    """
    costs, may = case.costs, np.full(len(time_s), case.policy.keep != "none")
    if case.policy.keep == "all":
        return dict.fromkeys(replicas, may)
    if costs.pool_gpus is not None:
        gpus = [costs.limits[name].gpus * count for name, count in replicas.items()]
        may &= np.sum(gpus, axis=0) <= costs.pool_gpus
    idle_s = {name: time_s - (paid_s[name] / count - costs.start_s[name]) for name, count in replicas.items()}
    return {name: may & (idle < costs.start_s[name]) for name, idle in idle_s.items()}


def prewarmed(
    case: Case, trainers: Mapping[str, Gangs], generate_gpus: Numbers, kept: Mapping[str, Flags]
) -> dict[str, Flags]:  # fmt: skip
    """What is started ahead: the next step's generate only where the pool will have room for it beside the trainers
    that are there in the end. [R] each
    """
    costs, found = case.costs, {name: np.full(len(generate_gpus), case.ahead) for name in kept}
    for name, t in trainers.items():
        found[name] &= t.open_s < t.call_s
    if costs.pool_gpus is not None and trainers:
        last_s = np.max([t.end_s for t in trainers.values()], axis=0) - costs.start_s[GENERATE]
        there = np.sum([t.counts * (t.end_s > last_s) for t in trainers.values()], axis=0)
        found[GENERATE] &= generate_gpus + costs.rank_gpus * there <= costs.pool_gpus
    return {name: ahead & ~kept[name] for name, ahead in found.items()}
