"""What planning a step needs to know of its functions: latency models, cold starts, prices, limits."""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.planner.base import GENERATE, TAIL, FunctionLimits
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.tail import TailFunction


@dataclass(frozen=True)
class Costs:
    """`price`: of one replica of each, per second, in any unit."""

    generate: GenerateCost
    followers: Mapping[str, WorkCost]
    trainers: Mapping[str, WorkCost]
    start_s: Mapping[str, float]
    price: Mapping[str, float]
    limits: Mapping[str, FunctionLimits]
    warm: frozenset[str]
    """Up when the step begins."""
    between_s: float = 0.0
    """Of a step in which no call is open."""
    pool_gpus: int | None = None
    """GPUs that all functions share; None: each function has its own."""
    tail: GenerateCost | None = None
    """Of the function that a tail may go on with."""

    @property
    def rank_gpus(self) -> int:
        """Of one rank of the train function that has most to a rank."""
        return max((self.limits[name].gpus for name in self.trainers), default=0)

    @property
    def tail_function(self) -> TailFunction | None:
        """What a tail may go on with, where anything is known of it."""
        if self.tail is None or TAIL not in self.limits:
            return None
        own, each, pool = self.limits[TAIL], self.limits[GENERATE].gpus, self.pool_gpus
        beside = sum(self.limits[name].gpus for name in self.followers)
        most = own.max_replicas if pool is None else min(own.max_replicas, (pool - beside) // max(1, own.gpus))
        start_s = self.start_s[TAIL]
        return TailFunction(
            self.tail.moved, own.max_batch, own.kv_tokens, start_s, most, own.gpus, each, pool if each else None
        )
