"""A step that is to be planned for one goal: what is known of it, and a first estimate of what follows generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import GENERATE
from orchestrator.planner.costs import Costs
from orchestrator.planner.policies import Policy
from orchestrator.planner.scaling import Goal
from orchestrator.planner.training import PACES, Batch

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """What a step's samples will have been, by sample number. [S] each"""

    prompt_tokens: Array
    lengths: Array
    per_prompt: int

    @cached_property
    def tokens(self) -> Array:
        return self.prompt_tokens + self.lengths

    def at(self, ready_s: Array) -> Batch:
        """By prompt group, which is ready when its last sample is. `ready_s` [R, S]"""
        ready_s = ready_s.reshape(len(ready_s), -1, self.per_prompt).max(axis=2)
        counts = np.full(ready_s.shape[1], float(self.per_prompt))
        return Batch(ready_s, counts, self.tokens.reshape(-1, self.per_prompt).sum(axis=1), float(self.tokens.max()))


@dataclass(frozen=True)
class Case:
    """`paces`: how generation may go (training.py)."""

    costs: Costs
    policy: Policy
    goal: Goal
    load: Workload
    may_stream: frozenset[str] = frozenset()
    """Train functions that can be streamed to, exactly."""
    paces: Sequence[float] = PACES

    @property
    def hurry(self) -> bool:
        """Starting ahead and streaming buy time and risk idle replicas: not where time is worth nothing."""
        return self.goal.objective != "cost" or self.goal.deadline_s is not None

    @property
    def ahead(self) -> bool:
        """Whether replicas are started before they are needed."""
        return self.policy.prewarm and self.hurry

    @cached_property
    def streamed(self) -> frozenset[str]:
        """Train functions that begin while samples come."""
        return self.may_stream if self.policy.stream and self.hurry else frozenset()

    @cached_property
    def delay_s(self) -> float:
        """Until the first replica of generate is up."""
        return 0.0 if GENERATE in self.costs.warm else self.costs.start_s[GENERATE]

    @cached_property
    def after(self) -> After:
        return After.of(self, float(self.load.tokens.sum()))


@dataclass(frozen=True)
class After:
    """What follows generation, before any of it has its place: reward, reference and critic on one replica each, gangs
    of as many ranks as there may be."""

    last_s: float
    """Of training that begins when all samples are there."""
    train_cost: float
    follow_cost: float
    follow_gpu_s: float
    stream_gpu_s: float
    """Of streamed training, without what its calls take for themselves:"""
    stream_shared_gpu_s: float
    """what their ranks share of it,"""
    stream_call_gpu_s: float
    """and what each rank takes."""
    stream_start_s: float
    """Until the slowest has started and loaded."""
    stream_own_s: float
    """The longest call, without its samples."""

    @classmethod
    def of(cls, case: Case, tokens: float) -> After:
        """`tokens`: of all samples, prompts included; drawn or predicted."""
        costs, limits, price = case.costs, case.costs.limits, case.costs.price
        samples = len(case.load.tokens)
        most = {name: limits[name].max_replicas for name in costs.trainers}
        whole_s = {name: cost.ranked_s(samples, tokens, most[name]) for name, cost in costs.trainers.items()}
        after = [seconds for name, seconds in whole_s.items() if name not in case.streamed]
        streams = [(name, costs.trainers[name]) for name in sorted(case.streamed) if name in costs.trainers]
        return cls(
            last_s=sum(after) if case.policy.colocated else max(after, default=0.0),
            train_cost=sum(price[f] * most[f] * (s + costs.start_s[f]) for f, s in whole_s.items()),
            follow_cost=sum(
                price[f] * (c.work_s(samples, tokens) + costs.start_s[f]) for f, c in costs.followers.items()
            ),
            follow_gpu_s=sum(limits[f].gpus * c.work_s(samples, tokens) for f, c in costs.followers.items()),
            stream_gpu_s=sum(limits[f].gpus * (c.work_s(samples, tokens) - c.call_s) for f, c in streams),
            stream_shared_gpu_s=sum(limits[f].gpus * c.shared_s for f, c in streams),
            stream_call_gpu_s=sum(limits[f].gpus * most[f] * c.call_s for f, c in streams),
            stream_start_s=max((costs.start_s[f] + c.call_s for f, c in streams), default=0.0),
            stream_own_s=max((c.own_s(most[f]) for f, c in streams), default=0.0),
        )
