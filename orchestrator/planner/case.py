"""A step that is to be planned: what is known of it, and a first estimate of what follows generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orchestrator.planner.arrays import Array, Flags
from orchestrator.planner.base import GENERATE
from orchestrator.planner.costs import Costs
from orchestrator.planner.policies import Policy
from orchestrator.planner.scaling import EXCHANGES, HURRY
from orchestrator.planner.training import PACES, Batch


@dataclass(frozen=True)
class Workload:
    """What a step's samples will have been, by sample number. [S] each"""

    prompt_tokens: Array
    lengths: Array
    per_prompt: int
    waits_s: Array | None = None
    """For answers, until each is finished; None: nobody answers them."""

    @cached_property
    def tokens(self) -> Array:
        return self.prompt_tokens + self.lengths

    def at(self, ready_s: Array, generated_s: Array) -> Batch:
        """By prompt group, which is ready when its last sample is. `ready_s` [R, S], `generated_s` [R]"""
        ready_s = ready_s.reshape(len(ready_s), -1, self.per_prompt).max(axis=2)
        counts = np.full(ready_s.shape[1], float(self.per_prompt))
        tokens = self.tokens.reshape(-1, self.per_prompt).sum(axis=1)
        return Batch(ready_s, counts, tokens, float(self.tokens.max()), generated_s)


@dataclass(frozen=True)
class Case:
    """`paces`: how generation may go (training.py)."""

    costs: Costs
    policy: Policy
    load: Workload
    may_stream: frozenset[str] = frozenset()
    """Train functions that can be streamed to, exactly."""
    paces: Sequence[float] = PACES

    @property
    def exchanges(self) -> Sequence[float]:
        """For which plans are made; a policy that looks for no goal has one."""
        return EXCHANGES if self.policy.replicas == "goal" else (1.0,)

    def hurries(self, exchange: Array) -> Flags:
        """Starting ahead and streaming buy time and risk idle replicas: not where time is worth nothing."""
        return exchange > HURRY

    def ahead(self, exchange: Array) -> Flags:
        """Whether replicas are started before they are needed."""
        return self.hurries(exchange) & self.policy.prewarm

    @cached_property
    def late(self) -> float:
        """Of its time, that generation takes longer on average; 0 where it takes less: what is started ahead of samples
        waits for those that are late, and starts with those that are early (orchestrator/step/plan_clock.py). Only a
        policy that looks for a goal counts it."""
        if self.policy.replicas != "goal":
            return 0.0
        return float(np.mean(np.maximum(0.0, np.array(self.paces) - 1.0)))

    @cached_property
    def streamed(self) -> frozenset[str]:
        """Train functions that may begin while samples come."""
        return self.may_stream if self.policy.stream else frozenset()

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

    late_s: float
    """Of training that begins when all samples are there, where some is streamed;"""
    whole_s: float
    """and where none is."""
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

    def last_s(self, hurries: Flags) -> Array:
        """Of training after the last sample."""
        return np.where(hurries, self.late_s, self.whole_s)

    @classmethod
    def of(cls, case: Case, tokens: float) -> After:
        """`tokens`: of all samples, prompts included; drawn or predicted."""
        costs, limits, price = case.costs, case.costs.limits, case.costs.price
        samples = len(case.load.tokens)
        most = {name: limits[name].max_replicas for name in costs.trainers}
        whole_s = {name: cost.ranked_s(samples, tokens, most[name]) for name, cost in costs.trainers.items()}
        late = [seconds for name, seconds in whole_s.items() if name not in case.streamed]
        after = sum if case.policy.colocated else max
        streams = [(name, costs.trainers[name]) for name in sorted(case.streamed) if name in costs.trainers]
        return cls(
            late_s=after([0.0, *late]),
            whole_s=after([0.0, *whole_s.values()]),
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
