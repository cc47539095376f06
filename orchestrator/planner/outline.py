"""What a step would take and cost with given shards: generation with its tail, the stages beside it, training.

0            generate: shards side by side, longest sample last; the tail moved together below the cut
first        reward, reference, critic: micro-batches of finished samples, on replicas of their own
first group  train functions that can be fed: prompt groups as they are whole (training.py)
both ended   the others, side by side
end          what is kept was paid for all the time; the rest from its start to its last call
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from orchestrator.planner.training import PACES, Batch, Room, Trainer, at_once, fed, rank_counts

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

BEAM = 8


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
    trainers: Mapping[str, Trainer]
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


@dataclass(frozen=True)
class _Training:
    """Some of the train functions placed."""

    found: Mapping[str, Trainer]
    room: Room
    ready_s: float
    """When all samples and columns are there."""
    end_s: float
    """Of those placed; at least `ready_s`."""
    spent: float


@dataclass(frozen=True)
class Load:
    """What a step's samples will have been, by sample number. [S] each"""

    prompt_tokens: Array
    lengths: Array
    per_prompt: int

    def at(self, ready_s: Array) -> Batch:
        """By prompt group, which is ready when its last sample is."""
        tokens = self.prompt_tokens + self.lengths
        grouped = [column.reshape(-1, self.per_prompt) for column in (ready_s, tokens)]
        counts = np.full(len(grouped[0]), float(self.per_prompt))
        return Batch(grouped[0].max(axis=1), counts, grouped[1].sum(axis=1), float(tokens.max()))


class Outliner:
    """Makes the choices that a policy leaves open, for given shards. `fed`: train functions that may be; `paces`: how
    generation may go (training.py)."""

    def __init__(
        self, costs: Costs, policy: Policy, goal: Goal, load: Load, fed: frozenset[str] = frozenset(),
        paces: Sequence[float] = PACES,
    ) -> None:  # fmt: skip
        self.costs, self.policy, self.goal, self.load = costs, policy, goal, load
        self.fed, self.paces = fed if policy.feed else frozenset[str](), paces
        self.samples = samples = len(load.lengths)
        self.mean_tokens = float((load.prompt_tokens + load.lengths).mean())
        # Starting ahead buys time with the risk of idle replicas: where time is worth nothing it only costs.
        self.ahead = policy.prewarm and (goal.objective != "cost" or goal.deadline_s is not None)
        whole_s = {name: cost.ranked_s(samples, samples * self.mean_tokens, costs.limits[name].max_replicas)
                   for name, cost in costs.trainers.items()}  # fmt: skip
        after = [seconds for name, seconds in whole_s.items() if name not in self.fed]
        self.last_s = sum(after) if policy.colocated else max(after, default=0.0)
        self.rest = sum(
            costs.price[name] * costs.limits[name].max_replicas * (seconds + costs.start_s[name])
            for name, seconds in whole_s.items()
        )
        self.delay_s = 0.0 if costs.name in costs.warm else costs.start_s[costs.name]

    def outline(self, shards: Sequence[Sequence[int]], states: Sequence[ShardState]) -> Outline:
        """The step with these shards."""
        limits = self.costs.limits[self.costs.name]
        end = Tail(states, self.costs.generate, max_batch=limits.max_batch, kv_tokens=limits.kv_tokens)
        tail = self._cut(end, len(shards))
        finish_s, numbers = end.finish(tail)
        finish_s = finish_s + self.delay_s
        if self.policy.fuse == "no":
            finish_s = np.full(self.samples, finish_s[-1])
        release_s = self._releases(end, tail)
        sizes = micro_batches(self.samples)
        found = [self._whole(shards, tail, finish_s, numbers, release_s, size) for size in sizes]
        best = min(found, key=lambda o: self.goal.rank(o.steady_s, o.cost))
        if len(self.costs.trainers) < 2 or not self.policy.feed:
            return best
        return self._whole(shards, tail, finish_s, numbers, release_s, best.micro_batch, BEAM)

    def _cut(self, end: Tail, shards: int) -> TailChoice:
        if self.policy.cut == "never":
            return end.uncut
        if self.policy.cut == "fixed":
            return end.at(round(self.policy.cut_fraction * self.samples), self._saturation(end))
        costs = self.costs
        starts = costs.start_s[costs.name] * shards

        def value(choice: TailChoice) -> tuple[float, float]:
            return self.goal.rank(
                choice.time_s + self.last_s, costs.price[costs.name] * (choice.replica_s + starts) + self.rest
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

    def _whole(
        self, shards: Sequence[Sequence[int]], tail: TailChoice, finish_s: Array, numbers: Numbers,
        release_s: Sequence[float], micro_batch: int, beam: int = 1,
    ) -> Outline:  # fmt: skip
        costs, policy = self.costs, self.policy
        gpus = {name: limits.gpus for name, limits in costs.limits.items()}
        room = Room(None if policy.colocated else costs.pool_gpus)
        for at_s in release_s:
            room.take(gpus[costs.name], at_s)
        followers: dict[str, Follower] = {}
        for name in costs.followers:
            followers[name] = self._beside(name, finish_s, room, micro_batch)
            room.take(followers[name].replicas * gpus[name], followers[name].end_s)
        generated_s = float(finish_s[-1])
        paid = {costs.name: tail.replica_s + costs.start_s[costs.name] * len(shards)}
        paid |= {name: f.replica_s for name, f in followers.items()}
        spent = sum(costs.price[name] * seconds for name, seconds in paid.items())
        own_gpus = len(shards) * gpus[costs.name]
        trainers = self._trainers(followers, finish_s, numbers, room, own_gpus, spent, beam)
        paid |= {name: t.replica_s for name, t in trainers.items()}
        replicas = {costs.name: len(shards)} | {name: f.replicas for name, f in followers.items()}
        replicas |= {name: t.replicas for name, t in trainers.items()}
        ends = [generated_s, *(f.end_s for f in followers.values()), *(t.end_s for t in trainers.values())]
        time_s = max(ends) + costs.between_s
        kept = self._keep(replicas, paid, time_s)
        prewarm = self._prewarm(replicas, trainers) - kept
        again_s = 0.0 if costs.name in kept | prewarm else costs.start_s[costs.name]
        for name in kept:
            paid[name] = replicas[name] * time_s
        cost = sum(costs.price[name] * seconds for name, seconds in paid.items())
        gpu_s = sum(gpus[name] * seconds for name, seconds in paid.items())
        if policy.colocated and costs.pool_gpus is not None:
            gpu_s = costs.pool_gpus * time_s
            cost = gpu_s * max(costs.price[n] / limit.gpus for n, limit in costs.limits.items() if limit.gpus)
        stages = [Stage(costs.name, self.delay_s, generated_s)]
        stages += [Stage(name, f.begin_s, f.end_s) for name, f in followers.items()]
        stages += [Stage(name, t.call_s, t.end_s) for name, t in trainers.items()]
        return Outline(
            shards, tail, micro_batch, followers, trainers, kept, prewarm, time_s, time_s - self.delay_s + again_s,
            cost, gpu_s, paid, stages,
        )  # fmt: skip

    def _beside(self, name: str, finish_s: Array, room: Room, micro_batch: int) -> Follower:
        """The stage on as many replicas as the goal likes best."""
        costs, limits = self.costs, self.costs.limits[name]
        start_s = 0.0 if name in costs.warm else costs.start_s[name]
        counts = [limits.max_replicas] if self.policy.replicas == "all" else replica_counts(limits.max_replicas)
        options = [
            follow(
                finish_s, self.mean_tokens, costs.followers[name], micro_batch=micro_batch, replicas=count,
                start_s=start_s, prewarmed=self.ahead, room_at_s=room.at_s(count * limits.gpus),
            )
            for count in counts
        ]  # fmt: skip

        def value(f: Follower) -> tuple[float, float]:
            time_s = max(f.end_s, float(finish_s[-1])) + self.last_s
            return self.goal.rank(time_s, costs.price[name] * f.replica_s + self.rest)

        return min(options, key=value)

    def _trainers(
        self, followers: Mapping[str, Follower], finish_s: Array, numbers: Numbers, room: Room, gpus: int, spent: float,
        beam: int,
    ) -> dict[str, Trainer]:  # fmt: skip
        """The train functions, those that are fed first, on as many ranks as the goal likes best: the choice for one
        leaves room to the next, so the best `beam` choices are followed up. `gpus`: of the next step's generate;
        `spent`: before.
        """
        costs = self.costs
        ready = np.max([finish_s, *(f.done_s for f in followers.values())], axis=0)
        by_number = np.zeros(len(ready))
        by_number[numbers] = ready
        load, ready_s = self.load.at(by_number), float(ready.max())
        if self.policy.colocated:  # stages that begin after generation take turns on the GPUs
            last_s = float(finish_s[-1])
            ready_s = last_s + sum(max(0.0, f.end_s - max(f.begin_s, last_s)) for f in followers.values())
        plans = [_Training({}, room, ready_s, ready_s, spent)]
        for name in sorted(costs.trainers, key=lambda name: name not in self.fed):
            after: list[tuple[tuple[float, float], _Training, Trainer]] = []
            for plan in plans:
                for trainer in self._options(name, load, plan):
                    end_s = max(plan.end_s, trainer.mean_end_s) + self._again_s([*plan.found.values(), trainer], gpus)
                    cost = plan.spent + costs.price[name] * trainer.mean_replica_s
                    after.append((self.goal.rank(end_s, cost), plan, trainer))
            after.sort(key=lambda option: option[0])
            gpus_each = costs.limits[name].gpus
            plans = [
                _Training(
                    {**plan.found, name: trainer}, plan.room.less(trainer.replicas * gpus_each, trainer.end_s),
                    ready_s, max(plan.end_s, trainer.end_s), plan.spent + costs.price[name] * trainer.mean_replica_s,
                )
                for _, plan, trainer in after[:beam]
            ]  # fmt: skip
        return dict(plans[0].found)

    def _options(self, name: str, load: Batch, plan: _Training) -> list[Trainer]:
        """One for each number of ranks."""
        cost, limits = self.costs.trainers[name], self.costs.limits[name]
        start_s = 0.0 if name in self.costs.warm else self.costs.start_s[name]
        most, price = limits.max_replicas, self.costs.price[name]
        found = []
        for count in rank_counts(limits.min_replicas or most, most) if self.policy.feed else [most]:
            room_at_s = plan.room.at_s(count * limits.gpus)
            ready_s = plan.end_s if self.policy.colocated else plan.ready_s
            options = [
                at_once(
                    load, cost, count, ready_s=ready_s, start_s=start_s, room_at_s=room_at_s, ahead=self.ahead,
                    loads=self.policy.feed,
                )
            ]  # fmt: skip
            if name in self.fed:
                options += fed(load, cost, count, start_s=start_s, room_at_s=room_at_s, paces=self.paces)
            ranks = [
                self.goal.rank(max(plan.ready_s, t.mean_end_s), price * t.mean_replica_s + plan.spent) for t in options
            ]
            found.append(options[ranks.index(min(ranks))])
        return found

    def _again_s(self, trainers: Sequence[Trainer], gpus: int) -> float:
        """What the next step's generate, on `gpus` GPUs, starts late because these leave it no room to start ahead."""
        start_s = self.costs.start_s[self.costs.name]
        return 0.0 if self.ahead and self._fits(trainers, gpus) else start_s

    def _fits(self, trainers: Sequence[Trainer], gpus: int) -> bool:
        """Whether the next step's generate finds room beside the trainers that are there in the end."""
        if self.costs.pool_gpus is None:
            return True
        start_s = self.costs.start_s[self.costs.name]
        end_s = max((t.end_s for t in trainers), default=0.0)
        each = max((self.costs.limits[name].gpus for name in self.costs.trainers), default=0)
        return gpus + sum(each * t.replicas for t in trainers if t.end_s > end_s - start_s) <= self.costs.pool_gpus

    def _prewarm(self, replicas: Mapping[str, int], trainers: Mapping[str, Trainer]) -> frozenset[str]:
        """What is started ahead: the next step's generate only where the pool will have room for it."""
        if not self.ahead:
            return frozenset()
        found = {name for name in replicas if name not in trainers and name != self.costs.name}
        found |= {name for name, t in trainers.items() if t.open_s < t.call_s}
        if self._fits(list(trainers.values()), replicas[self.costs.name] * self.costs.limits[self.costs.name].gpus):
            found.add(self.costs.name)
        return frozenset(found)

    def _keep(self, replicas: Mapping[str, int], paid_s: Mapping[str, float], time_s: float) -> frozenset[str]:
        """Held over the step's idle time when that is shorter than the cold start it saves, on average of a replica.

        In a pool that others need, only where all of them fit beside each other.
        """
        if self.policy.keep == "all":
            return frozenset(replicas)
        if self.policy.keep == "none":
            return frozenset()
        if self.costs.pool_gpus is not None and self._gpus(replicas, set(replicas)) > self.costs.pool_gpus:
            return frozenset()
        starts = self.costs.start_s
        return frozenset(
            name
            for name, count in replicas.items()
            if keep(time_s - (paid_s[name] / count - starts[name]), (), starts[name])
        )

    def _gpus(self, replicas: Mapping[str, int], names: Collection[str]) -> int:
        return sum(replicas[name] * self.costs.limits[name].gpus for name in names)
