"""What a step would take and cost with given shards: generation with its tail, the stages beside it, training.

0            generate: shards side by side, longest sample last; the tail moved together below the cut
first        reward, reference, critic: micro-batches of finished samples, on replicas of their own
both ended   train functions, side by side
end          what is kept was paid for all the time; the rest from its start to its last call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import FunctionLimits, Stage
from orchestrator.planner.fusion import Follower, follow, micro_batches, replica_counts
from orchestrator.planner.keepalive import keep
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.policies import Policy
from orchestrator.planner.scaling import Goal
from orchestrator.planner.tail import ShardState, Tail, TailChoice

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What the outline needs to know of the functions. `price`: of one replica of each, per second, in any unit."""

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
    name: str = "generate"
    pool_gpus: int | None = None
    """GPUs that all functions share; None: each function has its own."""


@dataclass(frozen=True)
class Outline:
    shards: Sequence[Sequence[int]]
    tail: TailChoice
    micro_batch: int
    followers: Mapping[str, Follower]
    keep: frozenset[str]
    prewarm: frozenset[str]
    """Functions whose replicas find room before they are needed; `generate`: those of the next step."""
    time_s: float
    """Of this step."""
    steady_s: float
    """Of a step like it that follows one like it."""
    cost: float
    gpu_s: float
    paid_s: Mapping[str, float]
    """Replica-seconds, by function; starts included."""
    stages: Sequence[Stage]


class Outliner:
    """Makes the choices that a policy leaves open, for given shards. Counts: `samples`, `mean_tokens` of one."""

    def __init__(self, costs: Costs, policy: Policy, goal: Goal, samples: int, mean_tokens: float) -> None:
        self.costs, self.policy, self.goal = costs, policy, goal
        self.samples, self.mean_tokens = samples, mean_tokens
        # Starting ahead buys time with the risk of idle replicas: where time is worth nothing it only costs.
        self.ahead = policy.prewarm and (goal.objective != "cost" or goal.deadline_s is not None)
        self.train_s = {name: cost.work_s(samples, samples * mean_tokens) for name, cost in costs.trainers.items()}
        self.last_s = sum(self.train_s.values()) if policy.colocated else max(self.train_s.values(), default=0.0)
        self.delay_s = 0.0 if costs.name in costs.warm else costs.start_s[costs.name]
        self.trainer_gpus = sum(costs.limits[name].gpus for name in self.train_s)

    def outline(self, shards: Sequence[Sequence[int]], states: Sequence[ShardState]) -> Outline:
        """The step with these shards."""
        limits = self.costs.limits[self.costs.name]
        end = Tail(states, self.costs.generate, max_batch=limits.max_batch, kv_tokens=limits.kv_tokens)
        tail = self._cut(end, len(shards))
        finish_s = end.finish_s(tail) + self.delay_s
        if self.policy.fuse == "no":
            finish_s = np.full(self.samples, finish_s[-1])
        release_s = self._releases(end, tail)
        sizes = micro_batches(self.samples)
        found = [self._whole(shards, tail, finish_s, release_s, size) for size in sizes]
        return min(found, key=lambda o: self.goal.rank(o.steady_s, o.cost))

    def _cut(self, end: Tail, shards: int) -> TailChoice:
        if self.policy.cut == "never":
            return end.uncut
        if self.policy.cut == "fixed":
            return end.at(round(self.policy.cut_fraction * self.samples), self._saturation(end))
        costs = self.costs
        rest = sum(costs.price[name] * (seconds + costs.start_s[name]) for name, seconds in self.train_s.items())
        starts = costs.start_s[costs.name] * shards

        def value(choice: TailChoice) -> tuple[float, float]:
            return self.goal.rank(
                choice.time_s + self.last_s, costs.price[costs.name] * (choice.replica_s + starts) + rest
            )

        return end.best(value)

    def _saturation(self, end: Tail) -> int:
        """RLHFuse's BS_max: samples at which the batch makes a decode step a quarter slower than it is for one."""
        generate = self.costs.generate
        held = float(np.mean([(s.prompt_tokens + s.lengths).mean() for s in end.shards]))
        each_s = generate.sequence_s + generate.kv_token_s * held
        return max(1, min(end.max_batch, int(0.25 * generate.step_s / each_s))) if each_s else end.max_batch

    def _releases(self, end: Tail, tail: TailChoice) -> list[float]:
        """When each generate replica is let go, ascending."""
        left = end.leftover(tail.cut_below)
        if left is None:
            return sorted((end.ends + self.delay_s).tolist())
        gone = np.minimum(end.ends, left.at_s) + self.delay_s
        return sorted(
            [*sorted(gone.tolist())[: len(gone) - tail.migrate_to], *[tail.time_s + self.delay_s] * tail.migrate_to]
        )

    def _room_at_s(self, need: int, taken: int, release_s: Sequence[float]) -> float:
        """When `need` GPUs are free beside generate and `taken` others; 0 where functions have their own."""
        if self.costs.pool_gpus is None or self.policy.colocated:
            return 0.0
        gpus = self.costs.limits[self.costs.name].gpus
        free = self.costs.pool_gpus - taken - gpus * len(release_s)
        for at_s in [0.0, *release_s]:
            free += gpus if at_s else 0
            if free >= need:
                return at_s
        return release_s[-1]

    def _whole(
        self, shards: Sequence[Sequence[int]], tail: TailChoice, finish_s: Array, release_s: Sequence[float],
        micro_batch: int,
    ) -> Outline:  # fmt: skip
        costs, policy = self.costs, self.policy
        followers: dict[str, Follower] = {}
        taken = 0
        for name in costs.followers:
            followers[name] = self._beside(name, finish_s, release_s, micro_batch, taken)
            taken += followers[name].replicas * costs.limits[name].gpus
        generated_s = float(finish_s[-1])
        ready_s = max([generated_s, *(f.end_s for f in followers.values())])
        if policy.colocated:  # stages beside each other share the GPUs: those that begin after generation take turns
            ready_s = generated_s + sum(max(0.0, f.end_s - max(f.begin_s, generated_s)) for f in followers.values())
        replicas = {costs.name: len(shards)} | {name: f.replicas for name, f in followers.items()}
        replicas |= {name: costs.limits[name].max_replicas for name in self.train_s}  # ranks of one gang
        paid = {costs.name: tail.replica_s + costs.start_s[costs.name] * len(shards)}
        paid |= {name: f.replica_s for name, f in followers.items()}
        paid |= {name: replicas[name] * (s + costs.start_s[name]) for name, s in self.train_s.items()}
        kept = self._keep(replicas, paid, ready_s + self.last_s)
        prewarm = self._prewarm(replicas, taken, ready_s, release_s) - kept
        wait_s = max(
            (costs.start_s[name] for name in self.train_s if name not in prewarm | kept | costs.warm), default=0.0
        )
        time_s = ready_s + wait_s + self.last_s + costs.between_s
        again_s = 0.0 if costs.name in kept | prewarm else costs.start_s[costs.name]
        for name in kept:
            paid[name] = replicas[name] * time_s
        cost = sum(costs.price[name] * seconds for name, seconds in paid.items())
        gpu_s = sum(costs.limits[name].gpus * seconds for name, seconds in paid.items())
        if policy.colocated and costs.pool_gpus is not None:
            gpu_s = costs.pool_gpus * time_s
            cost = gpu_s * max(costs.price[n] / limit.gpus for n, limit in costs.limits.items() if limit.gpus)
        begin_s = ready_s + wait_s
        stages = [Stage(costs.name, self.delay_s, generated_s)]
        stages += [Stage(name, f.begin_s, f.end_s) for name, f in followers.items()]
        stages += [Stage(name, begin_s, begin_s + s) for name, s in self.train_s.items()]
        return Outline(
            shards, tail, micro_batch, followers, kept, prewarm, time_s, time_s - self.delay_s + again_s, cost, gpu_s,
            paid, stages,
        )  # fmt: skip

    def _beside(self, name: str, finish_s: Array, release_s: Sequence[float], micro_batch: int, taken: int) -> Follower:
        """The stage on as many replicas as the goal likes best."""
        costs, limits = self.costs, self.costs.limits[name]
        start_s = 0.0 if name in costs.warm else costs.start_s[name]
        counts = [limits.max_replicas] if self.policy.replicas == "all" else replica_counts(limits.max_replicas)
        options = [
            follow(
                finish_s, self.mean_tokens, costs.followers[name], micro_batch=micro_batch, replicas=count,
                start_s=start_s, prewarmed=self.ahead,
                room_at_s=self._room_at_s(count * limits.gpus, taken, release_s),
            )
            for count in counts
        ]  # fmt: skip

        def value(f: Follower) -> tuple[float, float]:
            time_s = max(f.end_s, float(finish_s[-1])) + self.last_s
            rest = sum(costs.price[train] * seconds for train, seconds in self.train_s.items())
            return self.goal.rank(time_s, costs.price[name] * f.replica_s + rest)

        return min(options, key=value)

    def _prewarm(
        self, replicas: Mapping[str, int], taken: int, ready_s: float, release_s: Sequence[float]
    ) -> frozenset[str]:
        """What can be started ahead: beside what is still at work then, the GPUs of the pool must do."""
        if not self.ahead:
            return frozenset()
        found = set(replicas) - set(self.train_s) - {self.costs.name}
        first_s = ready_s - max((self.costs.start_s[name] for name in self.train_s), default=0.0)
        if self._room_at_s(self.trainer_gpus, taken, release_s) <= max(0.0, first_s):
            found |= set(self.train_s)
        pool, gpus = self.costs.pool_gpus, self.costs.limits[self.costs.name].gpus
        if pool is None or gpus * replicas[self.costs.name] + self.trainer_gpus <= pool:
            found.add(self.costs.name)
        return frozenset(found)

    def _keep(self, replicas: Mapping[str, int], paid_s: Mapping[str, float], time_s: float) -> frozenset[str]:
        """Held over the step's idle time when that is shorter than the cold start it saves, on average of a replica.

        In a pool that others need, only what leaves the trainers their room.
        """
        if self.policy.keep == "all":
            return frozenset(replicas)
        if self.policy.keep == "none":
            return frozenset()
        kept: set[str] = set()
        free = self.costs.pool_gpus
        for name, count in replicas.items():
            start_s = self.costs.start_s[name]
            busy_s = paid_s[name] / count - start_s
            gpus = self.costs.limits[name].gpus * count
            room = free is None or name in self.train_s or gpus + self.trainer_gpus <= free
            if room and keep(time_s - busy_s, (), start_s):
                kept.add(name)
                free = None if free is None else free - gpus
        return frozenset(kept)
