"""What a step would take and cost: generation with its tail, the stages beside it, training. Many steps side by side.

0            generate: shards side by side, longest sample last; the tail moved together below the cut, to some of its
             replicas or to those of the second function, which start ahead
first        reward, reference, critic: micro-batches of finished samples, on replicas of their own
first group  train functions that can be fed: prompt groups as they are whole (training.py)
both ended   the others, side by side
end          what is kept was paid for all the time; the rest from its start to its last call

All ways to deal the samples, with all cuts of their tails that are worth it, are the rows of the same arrays: a hundred
steps take hardly longer than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import GENERATE, TAIL, Stage
from orchestrator.planner.costs import Costs
from orchestrator.planner.cuts import Cuts, Dealt
from orchestrator.planner.fusion import Follower, Parts, Stream, micro_batches, replica_counts
from orchestrator.planner.policies import Policy
from orchestrator.planner.room import Room
from orchestrator.planner.scaling import Goal
from orchestrator.planner.tail import TailChoice
from orchestrator.planner.training import PACES, Batch, Gangs, Trainer, at_once, fed, rank_counts

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

BEAM = 8
RIVALS = 1.25
"""How far a cut of the tail may get ahead of the one that is most promising, in what is minimised."""


@dataclass(frozen=True)
class Outline:
    """One step."""

    shards: Sequence[Sequence[int]]
    tail: TailChoice
    micro_batch: int
    followers: Mapping[str, int]
    """Replicas of each stage beside generation."""
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
    stages: Sequence[Stage]
    open_s: float
    """When the second function's replicas are asked for."""


@dataclass(frozen=True)
class Load:
    """What a step's samples will have been, by sample number. [S] each"""

    prompt_tokens: Array
    lengths: Array
    per_prompt: int

    def at(self, ready_s: Array) -> Batch:
        """By prompt group, which is ready when its last sample is. `ready_s` [R, S]"""
        tokens = self.prompt_tokens + self.lengths
        ready_s = ready_s.reshape(len(ready_s), -1, self.per_prompt).max(axis=2)
        counts = np.full(ready_s.shape[1], float(self.per_prompt))
        return Batch(ready_s, counts, tokens.reshape(-1, self.per_prompt).sum(axis=1), float(tokens.max()))


@dataclass(frozen=True)
class _Steps:
    """Ways to deal the samples, with what becomes of their tails. [R] each; seconds from the step's start."""

    way: Numbers
    shards: Numbers
    finish_s: Array
    """When the samples are finished, ascending, [R, S]"""
    numbers: Numbers
    """and which they are. [R, S]"""
    gone_s: Array
    """When replicas of generate are let go, ascending; 0.0 of those that were never there. [R, N]"""
    generate_s: Array
    """Replica-seconds, without starts,"""
    wide_s: Array
    """and of the second function."""
    wide_gone_s: Array
    """When its replicas are let go; 0.0 of those that were never there. [R, M]"""
    open_s: Array
    """When they are asked for."""
    cut_below: Numbers


@dataclass(frozen=True)
class _Whole:
    """Those steps to their ends. [R] each"""

    steps: _Steps
    micro_batch: Numbers
    followers: Mapping[str, Follower]
    trainers: Mapping[str, Gangs]
    batch: Batch
    keep: Mapping[str, Flags]
    prewarm: Mapping[str, Flags]
    time_s: Array
    steady_s: Array
    cost: Array
    gpu_s: Array


class Outliner:
    """Makes the choices that a policy leaves open. `fed`: train functions that may be; `paces`: how generation may go
    (training.py)."""

    def __init__(
        self, costs: Costs, policy: Policy, goal: Goal, load: Load, fed: frozenset[str] = frozenset(),
        paces: Sequence[float] = PACES,
    ) -> None:  # fmt: skip
        self.costs, self.policy, self.goal, self.load = costs, policy, goal, load
        self.samples = len(load.lengths)
        self.tokens = load.prompt_tokens + load.lengths
        # Starting ahead and feeding buy time with the risk of idle replicas: where time is worth nothing they cost.
        hurry = goal.objective != "cost" or goal.deadline_s is not None
        self.ahead, self.paces = policy.prewarm and hurry, paces
        self.fed = fed if policy.stream and hurry else frozenset[str]()
        self.cuts = Cuts(costs, policy, goal, self.samples, self.tokens, self.fed)
        self.delay_s = 0.0 if GENERATE in costs.warm else costs.start_s[GENERATE]
        self._gpus = {name: limits.gpus for name, limits in costs.limits.items()}
        self._rank_gpus = max((costs.limits[name].gpus for name in costs.trainers), default=0)

    def outlines(self, ways: Sequence[Dealt], *, rivals: float = RIVALS) -> list[Outline]:
        """The best step with each way to deal the samples: with the most promising cut of its tail; of the ways that
        are then within `rivals` of the best one, with any.
        """
        cuts = [self.cuts.of(dealt) for dealt in ways]
        sizes, rows = np.array(micro_batches(self.samples)), np.arange(len(ways))
        whole = self._whole(
            self._steps(ways, [(way, tails[0]) for way, tails in enumerate(cuts) for _ in sizes]),
            np.tile(sizes, len(ways)), 1,
        )  # fmt: skip
        steady_s, cost = (column.reshape(len(ways), -1) for column in (whole.steady_s, whole.cost))
        best = self.goal.best(steady_s, cost)
        value = self.goal.rank(steady_s[rows, best], cost[rows, best])[0]
        near = value <= rivals * value.min()
        tails = [(way, tail) for way, found in enumerate(cuts) for tail in (found if near[way] else found[:1])]
        steps = self._steps(ways, tails)
        beam = BEAM if len(self.costs.trainers) > 1 and self.policy.stream else 1
        whole = self._whole(steps, sizes[best][steps.way], beam)
        outlines = []
        for way, dealt in enumerate(ways):
            of = np.flatnonzero(steps.way == way)
            row = int(of[self.goal.best(whole.steady_s[of], whole.cost[of])])
            outlines.append(self._outline(dealt.shards, tails[row][1], whole, row))
        return outlines

    def _steps(self, ways: Sequence[Dealt], tails: Sequence[tuple[int, TailChoice]]) -> _Steps:
        finished = [ways[way].finish(tail) for way, tail in tails]
        gone_s = [ways[way].gone_s(tail) for way, tail in tails]
        finish_s, numbers = np.stack([times for times, _ in finished]), np.stack([named for _, named in finished])
        if self.policy.fuse == "no":
            finish_s = np.repeat(finish_s[:, -1:], self.samples, axis=1)
        choices = [tail for _, tail in tails]
        return _Steps(
            np.array([way for way, _ in tails]),
            np.array([len(ways[way].shards) for way, _ in tails]),
            finish_s + self.delay_s,
            numbers,
            _columns(gone_s, self.delay_s),
            np.array([t.replica_s for t in choices]),
            np.array([t.wide_s for t in choices]),
            _columns([t.ends_s for t in choices], self.delay_s),
            np.array([t.open_s for t in choices]) + self.delay_s,
            np.array([t.cut_below for t in choices]),
        )

    def _whole(self, steps: _Steps, sizes: Numbers, beam: int) -> _Whole:
        costs, policy, gpus = self.costs, self.policy, self._gpus
        generate_gpus = steps.shards * gpus[GENERATE]
        room = Room.after(None if policy.colocated else costs.pool_gpus, gpus[GENERATE], steps.gone_s)
        if steps.wide_gone_s.shape[1]:
            room.promise(gpus[TAIL], steps.wide_gone_s, steps.open_s)
        parts = Parts.of(steps.finish_s, self.tokens[steps.numbers], sizes)
        followers: dict[str, Follower] = {}
        after = sum(gpus[name] for name in costs.followers)
        for name in costs.followers:
            after -= gpus[name]
            followers[name] = self._beside(name, parts, steps.finish_s[:, -1], room, after)
            room.take(followers[name].replicas * gpus[name], followers[name].end_s)
        paid = {GENERATE: steps.generate_s + costs.start_s[GENERATE] * steps.shards}
        if steps.wide_gone_s.shape[1]:
            paid[TAIL] = steps.wide_s
        paid |= {name: f.replica_s for name, f in followers.items()}
        batch, ready_s = self._ready(steps, parts, followers)
        room.begun(self._awaited_s(batch, steps.cut_below))
        spent = self._sum(costs.price, paid)
        trainers = self._trainers(batch, ready_s, room, generate_gpus, spent, beam)
        paid |= {name: t.replica_s for name, t in trainers.items()}
        replicas = {GENERATE: steps.shards} | {name: f.replicas for name, f in followers.items()}
        replicas |= {name: t.counts for name, t in trainers.items()}
        ends = [f.end_s for f in followers.values()] + [t.end_s for t in trainers.values()]
        time_s = np.max([steps.finish_s[:, -1], *ends], axis=0) + costs.between_s
        kept = self._keep(replicas, paid, time_s)
        prewarm = self._prewarm(trainers, followers, generate_gpus, kept)
        there = kept[GENERATE] | prewarm[GENERATE]
        for name, held in kept.items():
            paid[name] = np.where(held, replicas[name] * time_s, paid[name])
        cost, gpu_s = self._sum(costs.price, paid), self._sum(gpus, paid)
        if policy.colocated and costs.pool_gpus is not None:
            gpu_s = costs.pool_gpus * time_s
            cost = gpu_s * max(costs.price[n] / limit.gpus for n, limit in costs.limits.items() if limit.gpus)
        steady_s = time_s - self.delay_s + np.where(there, 0.0, costs.start_s[GENERATE])
        return _Whole(steps, sizes, followers, trainers, batch, kept, prewarm, time_s, steady_s, cost, gpu_s)

    def _sum(self, price: Mapping[str, float], seconds: Mapping[str, Array]) -> Array:
        found: Array = np.sum([price[name] * each for name, each in seconds.items()], axis=0)
        return found

    def _beside(self, name: str, parts: Parts, last_s: Array, room: Room, after: int) -> Follower:
        """The stage on as many replicas as the goal likes best. It begins with the first samples, whenever they come:
        what is promised, and a replica of each stage after it (`after` GPUs), have to fit beside it.
        """
        costs, limits = self.costs, self.costs.limits[name]
        start_s = 0.0 if name in costs.warm else costs.start_s[name]
        most = min(limits.max_replicas, parts.sizes.shape[1])  # more have nothing to do
        counts = [limits.max_replicas] if self.policy.replicas == "all" else replica_counts(most)
        stage, rows = Stream(parts, costs.followers[name], start_s, self.ahead), np.arange(len(last_s))
        rooms_s = np.broadcast_to(room.at_s([n * limits.gpus for n in counts]), (len(rows), len(counts)))
        found = [stage.follow(n, rooms_s[:, k]) for k, n in enumerate(counts)]
        columns = {
            column.name: np.stack([getattr(f, column.name) for f in found], axis=1) for column in fields(Follower)
        }
        fits = room.fits([n * limits.gpus + after for n in counts]) | (np.array(counts) == 1)
        end_s = np.where(fits, np.maximum(columns["end_s"], last_s[:, None]) + self.cuts.last_s, np.inf)
        best = self.goal.best(end_s, np.where(fits, costs.price[name] * columns["replica_s"] + self.cuts.rest, np.inf))
        return Follower(**{name: column[rows, best] for name, column in columns.items()})

    def _ready(self, steps: _Steps, parts: Parts, followers: Mapping[str, Follower]) -> tuple[Batch, Array]:
        """By prompt group; and when all samples and columns are there. [R]"""
        ready = steps.finish_s
        if followers:
            done_s = np.max([f.done_s for f in followers.values()], axis=0)
            ready = np.maximum(ready, np.take_along_axis(done_s, parts.place, axis=1))
        by_number = np.empty(ready.shape)
        np.put_along_axis(by_number, steps.numbers, ready, axis=1)
        ready_s: Array = ready.max(axis=1)
        if self.policy.colocated:  # stages that begin after generation take turns on the GPUs
            ready_s = last_s = steps.finish_s[:, -1]
            for f in followers.values():
                ready_s = ready_s + np.maximum(0.0, f.end_s - np.maximum(f.begin_s, last_s))
        return self.load.at(by_number), ready_s

    def _awaited_s(self, batch: Batch, cut_below: Numbers) -> Array:
        """So many groups cannot be whole before the tail has its replicas: whoever waits for them comes after those."""
        count = batch.ready_s.shape[1]
        groups = np.minimum(count - cut_below // self.load.per_prompt + 1, count - 1)
        found: Array = np.take_along_axis(np.sort(batch.ready_s, axis=1), groups[:, None], axis=1)[:, 0]
        return found

    def _trainers(
        self, batch: Batch, ready_s: Array, room: Room, generate_gpus: Numbers, spent: Array, beam: int
    ) -> dict[str, Gangs]:
        """The train functions, those that are fed first, on as many ranks as the goal likes best: the choice for one
        leaves room to the next, so the best `beam` choices are followed up. `generate_gpus`: of the next step's;
        `spent`: before. [R] each
        """
        costs, placed = self.costs, dict[str, Gangs]()
        ready_s, spent = ready_s[:, None], spent[:, None]
        end_s = ready_s
        names = sorted(costs.trainers, key=lambda name: name not in self.fed)
        for name in names:
            gangs = self._options(name, batch, room, ready_s, end_s, spent)
            worth = self._worth(name, placed, gangs, generate_gpus, end_s, spent)
            time_s, cost = (value.reshape(len(value), -1) for value in worth)
            if name == names[-1] or beam == 1:
                best = self.goal.best(time_s, cost)[:, None]
            else:
                best = np.lexsort(self.goal.rank(time_s, cost)[::-1], axis=1)[:, :beam]
            before = best // gangs.end_s.shape[2]
            gang = gangs.flat().pick(best)
            placed = {n: g.pick(before) for n, g in placed.items()} | {name: gang}
            room = room.less(before, gang.counts * self._gpus[name], gang.end_s)
            spent = np.take_along_axis(spent, before, axis=1) + costs.price[name] * gang.mean_replica_s
            end_s = np.maximum(np.take_along_axis(end_s, before, axis=1), gang.end_s)
        return {name: gang.first() for name, gang in placed.items()}

    def _worth(
        self, name: str, placed: Mapping[str, Gangs], gangs: Gangs, generate_gpus: Numbers, end_s: Array, spent: Array
    ) -> tuple[Array, Array]:
        """Time and cost of the step so far. [R, B, N] each"""
        start_s = self.costs.start_s[GENERATE]
        again_s = np.full(gangs.end_s.shape, 0.0 if self.ahead else start_s)
        if self.ahead and self.costs.pool_gpus is not None:  # else it finds room
            last_s = gangs.end_s
            for g in placed.values():
                last_s = np.maximum(last_s, g.end_s[:, :, None])
            last_s = last_s - start_s
            there = gangs.counts * (gangs.end_s > last_s)
            for g in placed.values():
                there = there + g.counts[:, :, None] * (g.end_s[:, :, None] > last_s)
            again_s[generate_gpus[:, None, None] + self._rank_gpus * there > self.costs.pool_gpus] = start_s
        time_s: Array = np.maximum(end_s[:, :, None], gangs.mean_end_s) + again_s
        return time_s, spent[:, :, None] + self.costs.price[name] * gangs.mean_replica_s

    def _options(self, name: str, batch: Batch, room: Room, ready_s: Array, end_s: Array, spent: Array) -> Gangs:
        """After each way to place those before, one for each number of ranks. [R, B, N]"""
        cost, limits = self.costs.trainers[name], self.costs.limits[name]
        start_s = 0.0 if name in self.costs.warm else self.costs.start_s[name]
        most, price = limits.max_replicas, self.costs.price[name]
        counts = rank_counts(limits.min_replicas or most, most) if self.policy.stream else [most]
        rooms_s = room.at_s([count * limits.gpus for count in counts])
        rooms_s = np.broadcast_to(rooms_s.reshape(len(rooms_s), -1, len(counts)), (*end_s.shape, len(counts)))
        begin_s = end_s if self.policy.colocated else np.broadcast_to(ready_s, end_s.shape)
        found = at_once(
            batch, cost, counts, ready_s=begin_s, start_s=start_s, rooms_s=rooms_s, ahead=self.ahead,
            loads=self.policy.stream,
        )  # fmt: skip
        if name in self.fed:
            found = found.beside(fed(batch, cost, counts, start_s=start_s, rooms_s=rooms_s, paces=self.paces))
        ends_s: Array = np.maximum(ready_s[:, :, None, None], found.mean_end_s)
        best = self.goal.best(ends_s, price * found.mean_replica_s + spent[:, :, None, None])
        return found.pick(best[..., None]).first()

    def _prewarm(
        self, trainers: Mapping[str, Gangs], followers: Mapping[str, Follower], generate_gpus: Numbers,
        kept: Mapping[str, Flags],
    ) -> dict[str, Flags]:  # fmt: skip
        """What is started ahead: the next step's generate only where the pool will have room for it beside the trainers
        that are there in the end.
        """
        costs, found = self.costs, {name: np.full(len(generate_gpus), self.ahead) for name in kept}
        for name, t in trainers.items():
            found[name] &= t.open_s < t.call_s
        if costs.pool_gpus is not None and trainers:
            last_s = np.max([t.end_s for t in trainers.values()], axis=0) - costs.start_s[GENERATE]
            there = np.sum([t.counts * (t.end_s > last_s) for t in trainers.values()], axis=0)
            found[GENERATE] &= generate_gpus + self._rank_gpus * there <= costs.pool_gpus
        return {name: ahead & ~kept[name] for name, ahead in found.items()}

    def _keep(self, replicas: Mapping[str, Numbers], paid_s: Mapping[str, Array], time_s: Array) -> dict[str, Flags]:
        """Held over the step's idle time when that is shorter than the cold start it saves, on average of a replica
        (keepalive.py: what is best without a history).

        In a pool that others need, only where all of them fit beside each other.
        """
        costs, may = self.costs, np.full(len(time_s), self.policy.keep != "none")
        if self.policy.keep == "all":
            return dict.fromkeys(replicas, may)
        if costs.pool_gpus is not None:
            may &= np.sum([self._gpus[name] * count for name, count in replicas.items()], axis=0) <= costs.pool_gpus
        idle_s = {name: time_s - (paid_s[name] / count - costs.start_s[name]) for name, count in replicas.items()}
        return {name: may & (idle < costs.start_s[name]) for name, idle in idle_s.items()}

    def _outline(self, shards: Sequence[Sequence[int]], tail: TailChoice, whole: _Whole, row: int) -> Outline:
        trainers = {name: gang.trainer(row, whole.batch) for name, gang in whole.trainers.items()}
        stages = [Stage(GENERATE, self.delay_s, float(whole.steps.gone_s[row, -1]))]
        if tail.function == TAIL:
            stages.append(Stage(TAIL, tail.begin_s + self.delay_s, max(tail.ends_s) + self.delay_s))
        stages += [Stage(name, float(f.begin_s[row]), float(f.end_s[row])) for name, f in whole.followers.items()]
        stages += [Stage(name, t.call_s, t.end_s) for name, t in trainers.items()]
        return Outline(
            shards=shards,
            tail=tail,
            micro_batch=int(whole.micro_batch[row]),
            followers={name: int(f.replicas[row]) for name, f in whole.followers.items()},
            trainers=trainers,
            keep=frozenset(name for name, held in whole.keep.items() if held[row]),
            prewarm=frozenset(name for name, ahead in whole.prewarm.items() if ahead[row]),
            generated_s=float(whole.steps.finish_s[row, -1]),
            time_s=float(whole.time_s[row]),
            steady_s=float(whole.steady_s[row]),
            cost=float(whole.cost[row]),
            gpu_s=float(whole.gpu_s[row]),
            stages=stages,
            open_s=tail.open_s + self.delay_s,
        )


def _columns(rows: Sequence[Sequence[float] | Array], later_s: float) -> Array:
    """Times of each row, so much later, ascending; rows that have fewer begin with 0.0. [R, N]"""
    found = np.zeros((len(rows), max(len(row) for row in rows)))
    for k, row in enumerate(rows):
        if len(row):
            found[k, -len(row) :] = np.sort(row) + later_s
    return found
