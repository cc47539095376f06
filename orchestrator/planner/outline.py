"""What a step would take and cost with given shards: generation with its tail, the stages beside it, training.

0            generate: shards side by side, longest sample last; the tail moved together below the cut, to some of its
             replicas or to those of the second function, which start ahead
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

from orchestrator.planner.base import TAIL, Stage
from orchestrator.planner.costs import Costs
from orchestrator.planner.cuts import Cuts, releases
from orchestrator.planner.fusion import Follower, Stream, micro_batches, replica_counts
from orchestrator.planner.keepalive import keep
from orchestrator.planner.policies import Policy
from orchestrator.planner.scaling import Goal
from orchestrator.planner.tail import ShardState, Tail, TailChoice
from orchestrator.planner.training import PACES, Batch, Gangs, Room, Trainer, at_once, fed, rank_counts

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

BEAM = 8


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
    generated_s: float
    """When the last sample is expected."""
    time_s: float
    """Of this step."""
    steady_s: float
    """Of a step like it that follows one like it."""
    cost: float
    gpu_s: float
    paid_s: Mapping[str, float]
    """Replica-seconds, by function; starts included."""
    stages: Sequence[Stage]
    open_s: float
    """When the second function's replicas are asked for."""


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
        self.tokens = load.prompt_tokens + load.lengths
        # Starting ahead buys time with the risk of idle replicas: where time is worth nothing it only costs.
        self.ahead = policy.prewarm and (goal.objective != "cost" or goal.deadline_s is not None)
        self.cuts = Cuts(costs, policy, goal, samples, self.tokens, self.fed)
        self.wide = costs.wide if policy.wide else None
        self.delay_s = 0.0 if costs.name in costs.warm else costs.start_s[costs.name]
        self._rank_gpus = max((costs.limits[name].gpus for name in costs.trainers), default=0)

    def outline(self, shards: Sequence[Sequence[int]], states: Sequence[ShardState]) -> Outline:
        """The step with these shards."""
        limits = self.costs.limits[self.costs.name]
        end = Tail(
            states, self.costs.generate, max_batch=limits.max_batch, kv_tokens=limits.kv_tokens, wide=self.wide
        )  # fmt: skip
        found: list[Outline] = []
        sizes = micro_batches(self.samples)
        for tail in self.cuts.of(end, len(shards)):
            if found and self.cuts.least(tail, len(shards)) >= min(self._rank(o) for o in found):
                continue
            finish_s, numbers = end.finish(tail)
            finish_s = finish_s + self.delay_s
            if self.policy.fuse == "no":
                finish_s = np.full(self.samples, finish_s[-1])
            ways = (shards, tail, finish_s, numbers, [at_s + self.delay_s for at_s in releases(end, tail)])
            beam = BEAM if len(self.costs.trainers) > 1 and self.policy.feed else 1
            if len(sizes) > 1:
                sizes = [min((self._whole(*ways, size) for size in sizes), key=self._rank).micro_batch]
            best = self._whole(*ways, sizes[0], beam)
            found.append(best)
        return min(found, key=self._rank)

    def _rank(self, outline: Outline) -> tuple[float, float]:
        return self.goal.rank(outline.steady_s, outline.cost)

    def _whole(
        self, shards: Sequence[Sequence[int]], tail: TailChoice, finish_s: Array, numbers: Numbers,
        release_s: Sequence[float], micro_batch: int, beam: int = 1,
    ) -> Outline:  # fmt: skip
        costs, policy = self.costs, self.policy
        gpus = {name: limits.gpus for name, limits in costs.limits.items()}
        room = Room(None if policy.colocated else costs.pool_gpus)
        for at_s in release_s:
            room.take(gpus[costs.name], at_s)
        if tail.function == TAIL:
            room.promise(gpus[TAIL], [at_s + self.delay_s for at_s in tail.ends_s], tail.open_s + self.delay_s)
        followers: dict[str, Follower] = {}
        after = sum(gpus[name] for name in costs.followers)
        tokens = self.tokens[numbers]
        for name in costs.followers:
            after -= gpus[name]
            followers[name] = self._beside(name, finish_s, tokens, room, micro_batch, after)
            room.take(followers[name].replicas * gpus[name], followers[name].end_s)
        generated_s = float(finish_s[-1])
        paid = {costs.name: tail.replica_s + costs.start_s[costs.name] * len(shards)}
        if tail.function == TAIL:
            paid[TAIL] = tail.wide_s
        paid |= {name: f.replica_s for name, f in followers.items()}
        spent = sum(costs.price[name] * seconds for name, seconds in paid.items())
        own_gpus = len(shards) * gpus[costs.name]
        trainers = self._trainers(followers, finish_s, numbers, room, tail, own_gpus, spent, beam)
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
        stages = [Stage(costs.name, self.delay_s, max(release_s))]
        if tail.function == TAIL:
            stages.append(Stage(TAIL, tail.begin_s + self.delay_s, max(tail.ends_s) + self.delay_s))
        stages += [Stage(name, f.begin_s, f.end_s) for name, f in followers.items()]
        stages += [Stage(name, t.call_s, t.end_s) for name, t in trainers.items()]
        return Outline(
            shards, tail, micro_batch, followers, trainers, kept, prewarm, generated_s, time_s,
            time_s - self.delay_s + again_s, cost, gpu_s, paid, stages, tail.open_s + self.delay_s,
        )  # fmt: skip

    def _beside(self, name: str, finish_s: Array, tokens: Array, room: Room, micro_batch: int, after: int) -> Follower:
        """The stage on as many replicas as the goal likes best. It begins with the first samples, whenever they come:
        what is promised, and a replica of each stage after it (`after` GPUs), have to fit beside it.
        """
        costs, limits = self.costs, self.costs.limits[name]
        start_s = 0.0 if name in costs.warm else costs.start_s[name]
        counts = [limits.max_replicas] if self.policy.replicas == "all" else replica_counts(limits.max_replicas)
        counts = [n for n in counts if n == 1 or room.fits(n * limits.gpus + after)]

        def value(end_s: float, replica_s: float) -> tuple[float, float]:
            return self.goal.rank(
                max(end_s, float(finish_s[-1])) + self.cuts.last_s, costs.price[name] * replica_s + self.cuts.rest
            )

        stage = Stream(finish_s, tokens, costs.followers[name], micro_batch, start_s, self.ahead)
        rooms_s = dict(zip(counts, room.each_at_s([n * limits.gpus for n in counts]), strict=True))
        bounds = [(value(*stage.least(n, rooms_s[n])), n) for n in counts]
        best: Follower | None = None
        for bound, count in sorted(bounds):
            if best is not None and bound >= value(best.end_s, best.replica_s):
                break
            found = stage.follow(count, rooms_s[count])
            if best is None or value(found.end_s, found.replica_s) < value(best.end_s, best.replica_s):
                best = found
        assert best is not None, "there is a number of replicas"
        return best

    def _trainers(
        self, followers: Mapping[str, Follower], finish_s: Array, numbers: Numbers, room: Room, tail: TailChoice,
        gpus: int, spent: float, beam: int,
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
        if tail.function == TAIL:
            # So many groups cannot be whole before the tail has its replicas: whoever waits for them comes after those.
            groups = len(load.ready_s) - tail.cut_below // self.load.per_prompt + 1
            room.begun(float(np.sort(load.ready_s)[min(groups, len(load.ready_s) - 1)]))
        plans = [_Training({}, room, ready_s, ready_s, spent)]
        names = sorted(costs.trainers, key=lambda name: name not in self.fed)
        for name in names:
            gangs = self._options(name, load, plans)
            first, second = self._worth(name, plans, gangs, gpus)
            gpus_each, rows = costs.limits[name].gpus, len(gangs.counts) // len(plans)
            after: list[_Training] = []
            for row in np.lexsort((second, first))[: 1 if name == names[-1] else beam].tolist():
                plan, trainer = plans[row // rows], gangs.trainer(row, 0)
                room_left = plan.room.less(trainer.replicas * gpus_each, trainer.end_s)
                spent = plan.spent + costs.price[name] * trainer.mean_replica_s
                end_s = max(plan.end_s, trainer.end_s)
                after.append(_Training({**plan.found, name: trainer}, room_left, ready_s, end_s, spent))
            plans = after
        return dict(plans[0].found)

    def _worth(self, name: str, plans: Sequence[_Training], gangs: Gangs, gpus: int) -> tuple[Array, Array]:
        """What is minimised, and what decides between equals. [plans x N] each"""
        start_s, end_s, rows = self.costs.start_s[self.costs.name], gangs.end_s[:, 0], len(gangs.counts) // len(plans)
        again_s = np.full(len(end_s), 0.0 if self.ahead else start_s)
        if self.ahead and self.costs.pool_gpus is not None:  # else it finds room
            placed = [list(plan.found.values()) for plan in plans]
            ends_s = np.repeat([[t.end_s for t in found] for found in placed], rows, axis=0)
            counts = np.repeat([[t.replicas for t in found] for found in placed], rows, axis=0)
            last_s = np.maximum(end_s, ends_s.max(axis=1, initial=0.0)) - start_s
            there = gangs.counts * (end_s > last_s) + (counts * (ends_s > last_s[:, None])).sum(axis=1)
            again_s[gpus + self._rank_gpus * there > self.costs.pool_gpus] = start_s
        time_s: Array = np.maximum(np.repeat([plan.end_s for plan in plans], rows), gangs.mean_end_s[:, 0]) + again_s
        spent = np.repeat([plan.spent for plan in plans], rows)
        return self.goal.rank(time_s, spent + self.costs.price[name] * gangs.mean_replica_s[:, 0])

    def _options(self, name: str, load: Batch, plans: Sequence[_Training]) -> Gangs:
        """After each plan, one for each number of ranks. [plans x N]"""
        cost, limits = self.costs.trainers[name], self.costs.limits[name]
        start_s = 0.0 if name in self.costs.warm else self.costs.start_s[name]
        most, price = limits.max_replicas, self.costs.price[name]
        counts = rank_counts(limits.min_replicas or most, most) if self.policy.feed else [most]
        sizes = [count * limits.gpus for count in counts]
        rooms_s = [at_s for plan in plans for at_s in plan.room.each_at_s(sizes)]
        ready_s = np.repeat([plan.end_s if self.policy.colocated else plan.ready_s for plan in plans], len(counts))
        spent = np.repeat([plan.spent for plan in plans], len(counts))
        counts = counts * len(plans)
        found = at_once(
            load, cost, counts, ready_s=ready_s, start_s=start_s, rooms_s=rooms_s, ahead=self.ahead,
            loads=self.policy.feed,
        )  # fmt: skip
        if name not in self.fed:
            return found
        both = found.beside(fed(load, cost, counts, start_s=start_s, rooms_s=rooms_s, paces=self.paces))
        end_s: Array = np.maximum(plans[0].ready_s, both.mean_end_s)
        first, second = self.goal.rank(end_s, price * both.mean_replica_s + spent[:, None])
        return both.pick(np.lexsort((second, first), axis=1)[:, 0])

    def _fits(self, trainers: Sequence[Trainer], gpus: int) -> bool:
        """Whether the next step's generate, on `gpus` GPUs, finds room to start ahead beside the trainers that are
        there in the end.
        """
        if self.costs.pool_gpus is None:
            return True
        last_s = max((t.end_s for t in trainers), default=0.0) - self.costs.start_s[self.costs.name]
        there = sum(t.replicas for t in trainers if t.end_s > last_s)
        return gpus + self._rank_gpus * there <= self.costs.pool_gpus

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
