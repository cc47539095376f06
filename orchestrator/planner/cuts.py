"""Which cuts of the tail are worth working out: each is judged by a first estimate of the step that it leads to."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import TAIL
from orchestrator.planner.costs import Costs
from orchestrator.planner.policies import Policy
from orchestrator.planner.scaling import Goal
from orchestrator.planner.tail import Tail, TailChoice

Array = npt.NDArray[np.float64]

WORKED_OUT = 6
"""Cuts whose tail goes on with the second function."""


class Cuts:
    """`samples` of so many `tokens` [S], prompts included; `fed`: train functions that work while samples come."""

    def __init__(
        self, costs: Costs, policy: Policy, goal: Goal, samples: int, lengths: Array, fed: frozenset[str]
    ) -> None:
        self.costs, self.policy, self.goal, self.samples, self.fed = costs, policy, goal, samples, fed
        tokens, limits = samples * float(lengths.mean()), costs.limits
        whole_s = {
            name: cost.ranked_s(samples, tokens, limits[name].max_replicas) for name, cost in costs.trainers.items()
        }
        after = [seconds for name, seconds in whole_s.items() if name not in fed]
        self.last_s = sum(after) if policy.colocated else max(after, default=0.0)
        """Of training that begins when all samples are there."""
        self.rest = sum(
            costs.price[name] * limits[name].max_replicas * (seconds + costs.start_s[name])
            for name, seconds in whole_s.items()
        )
        """What all training costs."""
        self.follow_gpu_s = sum(limits[f].gpus * c.work_s(samples, tokens) for f, c in costs.followers.items())
        feeds = [(limits[f].gpus, costs.trainers[f]) for f in fed if f in costs.trainers]
        self.fed_gpu_s = sum(gpus * (cost.work_s(samples, tokens) - cost.call_s) for gpus, cost in feeds)
        self.fed_own_gpu_s = sum(gpus * cost.shared_s / 2 for gpus, cost in feeds)
        starts = [costs.start_s[f] + costs.trainers[f].call_s for f in fed if f in costs.trainers]
        self.fed_start_s = max(starts, default=0.0)

        self.after_s = max((self._after_s(f, tokens, float(lengths.max())) for f in costs.trainers), default=0.0)
        """What training takes at the least after the last sample."""
        start_s = {name: 0.0 if name in costs.warm else costs.start_s[name] for name in limits}
        self.work_cost = sum(
            costs.price[f] * (c.work_s(samples, tokens) + start_s[f]) for f, c in costs.followers.items()
        )
        for name, cost in costs.trainers.items():
            ranks = self._least_ranks(name)
            paid_s = self._work_s(name, tokens) + ranks * (cost.own_s(ranks) + start_s[name])
            self.work_cost += costs.price[name] * paid_s
        """What all but generation costs at the least."""

    def _after_s(self, name: str, tokens: float, longest: float) -> float:
        cost, ranks = self.costs.trainers[name], self.costs.limits[name].max_replicas
        work_s = 0.0 if name in self.fed else self._work_s(name, tokens) / ranks
        return max(work_s, cost.token_s * longest) + cost.own_s(ranks) / 2

    def _work_s(self, name: str, tokens: float) -> float:
        """Of one rank, the call's own seconds aside."""
        cost = self.costs.trainers[name]
        return cost.sample_s * self.samples + cost.token_s * tokens

    def _least_ranks(self, name: str) -> int:
        limits = self.costs.limits[name]
        return (limits.min_replicas or limits.max_replicas) if self.policy.feed else limits.max_replicas

    def of(self, end: Tail, shards: int) -> list[TailChoice]:
        """What may become of the tail, the most promising first."""
        if self.policy.cut == "never":
            return [end.uncut]
        if self.policy.cut == "fixed":
            return [end.at(round(self.policy.cut_fraction * self.samples), self._saturation(end))]

        def value(choice: TailChoice) -> tuple[float, float]:
            return self._value(choice, end, shards)

        wide = sorted(end.widened(), key=value)
        return sorted([end.best(value), *wide[:WORKED_OUT]], key=value)

    def least(self, choice: TailChoice, shards: int) -> tuple[float, float]:
        """What no step with this cut is better than."""
        return self.goal.rank(choice.time_s + self.after_s, self._spent(choice, shards)[0] + self.work_cost)

    def _spent(self, choice: TailChoice, shards: int) -> tuple[float, float]:
        """Cost and GPU-seconds of generation."""
        costs, limits = self.costs, self.costs.limits
        narrow_s = choice.replica_s + costs.start_s[costs.name] * shards
        cost, gpu_s = costs.price[costs.name] * narrow_s, limits[costs.name].gpus * narrow_s
        if choice.function == TAIL:
            cost, gpu_s = cost + costs.price[TAIL] * choice.wide_s, gpu_s + limits[TAIL].gpus * choice.wide_s
        return cost, gpu_s

    def _value(self, choice: TailChoice, end: Tail, shards: int) -> tuple[float, float]:
        cost, gpu_s = self._spent(choice, shards)
        time_s = max(choice.time_s, self._fed_s(choice, gpu_s, shards)) + self.last_s
        return self.goal.rank(time_s, cost + self.rest)

    def _fed_s(self, choice: TailChoice, generate_gpu_s: float, shards: int) -> float:
        """When what is fed is done: on the GPUs that are free from the start, from the cut on, or in the end."""
        pool = self.costs.pool_gpus
        if pool is None or self.policy.colocated or not self.fed:
            return 0.0
        narrow = shards * self.costs.limits[self.costs.name].gpus
        wide = choice.migrate_to * self.costs.limits[TAIL].gpus if choice.function == TAIL else 0
        beside = math.ceil(self.follow_gpu_s / max(choice.time_s, 1e-9))
        found = [choice.time_s + (self.fed_gpu_s + 2 * self.fed_own_gpu_s) / pool + self.fed_start_s]
        for free, at_s in ((pool - max(narrow, wide), 0.0), (pool - wide, choice.begin_s if wide else choice.time_s)):
            if (ranks := free - beside) > 0:
                own_s = self.fed_own_gpu_s / ranks
                found.append(max(at_s + self.fed_start_s + own_s + self.fed_gpu_s / ranks, choice.time_s) + own_s)
        return max(min(found), (generate_gpu_s + self.follow_gpu_s + self.fed_gpu_s) / pool)

    def _saturation(self, end: Tail) -> int:
        """RLHFuse's BS_max: samples at which the batch makes a decode step a quarter slower than it is for one."""
        generate = self.costs.generate
        held = float(np.mean([(s.prompt_tokens + s.lengths).mean() for s in end.shards]))
        each_s = generate.sequence_s + generate.kv_token_s * held
        return max(1, min(end.max_batch, int(0.25 * generate.step_s / each_s))) if each_s else end.max_batch


def releases(end: Tail, tail: TailChoice) -> list[float]:
    """When each replica of generate is let go, ascending; seconds from the first call."""
    left = end.leftover(tail.cut_below)
    if left is None:
        return sorted(end.ends.tolist())
    gone = sorted(np.minimum(end.ends, left.gone_s).tolist())
    return gone if tail.function == TAIL else [*gone[: len(gone) - tail.migrate_to], *[tail.time_s] * tail.migrate_to]
