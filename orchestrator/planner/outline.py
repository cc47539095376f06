"""What a step would take and cost: generation with its tail, the stages beside it, training. Many steps side by side.

0            generate: shards side by side, longest sample last; the tail moved together below the cut, to some of its
             replicas or to those of the tail function, which start ahead
first        reward, reference, critic: micro-batches of finished samples, on replicas of their own
first group  streamed training: prompt groups as they are whole (training.py)
both ended   the others, side by side
end          a replica was paid for from its start to its last call; all the time where all are kept

All ways to deal the samples, with all cuts of their tails that are worth it, are the rows of the same arrays: a hundred
steps take hardly longer than one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from orchestrator.planner.arrays import Array, Flags, Numbers
from orchestrator.planner.base import GENERATE, TAIL, PlannedStage
from orchestrator.planner.beside import awaited_s, followers, ready
from orchestrator.planner.case import Case
from orchestrator.planner.cuts import Cuts, Dealt
from orchestrator.planner.fusion import Follower, Parts, micro_batches
from orchestrator.planner.generation import Generations
from orchestrator.planner.prewarm import prewarmed
from orchestrator.planner.ranks import BEAM, trainers
from orchestrator.planner.room import Room
from orchestrator.planner.scaling import best, worth
from orchestrator.planner.tail import TailChoice
from orchestrator.planner.training import Batch, Gangs, Trainer

Table = TypeVar("Table", Generations, Follower, Gangs)
RIVALS = 1.25
"""How far a way may be behind the best one, in what is minimised, before only its most promising cut is worked out."""
BEAMS_GAIN = 1.15
"""How much one way may gain over another by several beams instead of one (training.py)."""


@dataclass(frozen=True)
class Outline:
    """One step."""

    shards: Sequence[Sequence[int]]
    tail: TailChoice
    micro_batch: int
    followers: Mapping[str, int]
    """Replicas of each stage beside generation."""
    trainers: Mapping[str, Trainer]
    prewarm: frozenset[str]
    """Functions whose replicas find room before they are needed; `generate`: those of the next step."""
    generated_s: float
    """When the last sample is expected."""
    time_s: float
    """Of this step."""
    stages: Sequence[PlannedStage]
    open_s: float
    """When the tail function's replicas are asked for."""


@dataclass(frozen=True)
class Outlines:
    """R steps to their ends; times and costs on average over how generation may go. [R] each"""

    ways: Sequence[Dealt]
    tails: Sequence[TailChoice]
    steps: Generations
    micro_batch: Numbers
    followers: Mapping[str, Follower]
    trainers: Mapping[str, Gangs]
    batch: Batch
    prewarm: Mapping[str, Flags]
    time_s: Array
    steady_s: Array
    """Of a step like it that follows one like it."""
    cost: Array
    gpu_s: Array
    delay_s: float

    def rows(self, places: Numbers) -> "Outlines":
        """Of some of the steps."""
        batch = replace(
            self.batch, ready_s=self.batch.ready_s[places], generated_s=self.batch.generated_s[places]
        )  # fmt: skip
        return Outlines(
            self.ways, [self.tails[row] for row in places], _rows(self.steps, places), self.micro_batch[places],
            {name: _rows(f, places) for name, f in self.followers.items()},
            {name: _rows(g, places) for name, g in self.trainers.items()}, batch,
            {name: flags[places] for name, flags in self.prewarm.items()},
            self.time_s[places], self.steady_s[places], self.cost[places], self.gpu_s[places], self.delay_s,
        )  # fmt: skip

    def outline(self, row: int) -> Outline:
        tail = self.tails[row]
        trainers = {name: gang.trainer(row, self.batch) for name, gang in self.trainers.items()}
        stages = [PlannedStage(GENERATE, self.delay_s, float(self.steps.gone_s[row, -1]))]
        if tail.function == TAIL:
            stages.append(PlannedStage(TAIL, tail.begin_s + self.delay_s, max(tail.ends_s) + self.delay_s))
        for name, follower in self.followers.items():
            stages.append(PlannedStage(name, float(follower.begin_s[row]), float(follower.end_s[row])))
        stages += [PlannedStage(name, t.call_s, t.end_s) for name, t in trainers.items()]
        return Outline(
            shards=self.ways[self.steps.way[row]].shards,
            tail=tail,
            micro_batch=int(self.micro_batch[row]),
            followers={name: int(f.replicas[row]) for name, f in self.followers.items()},
            trainers=trainers,
            prewarm=frozenset(name for name, ahead in self.prewarm.items() if ahead[row]),
            generated_s=float(self.steps.finish_s[row, -1]),
            time_s=float(self.time_s[row]),
            stages=stages,
            open_s=tail.open_s + self.delay_s,
        )


class Outliner:
    """Makes the choices that the case's policy leaves open."""

    def __init__(self, case: Case) -> None:
        self.case, self.cuts = case, Cuts(case)

    def outlines(self, ways: Sequence[Dealt], *, rivals: float = RIVALS) -> Outlines:
        """Steps with each way to deal the samples, for each of the case's exchanges: with the most promising cut of the
        tail; of the ways that are then within `rivals` of the best one, with any.
        """
        exchanges, count = self.case.exchanges, len(ways)
        cuts = [self.cuts.of(dealt) for dealt in ways]
        pairs = [(way, e) for way in range(count) for e in range(len(exchanges))]
        sizes = np.array(micro_batches(len(self.case.load.tokens)))
        rows = [(way, exchanges[e], cuts[way][e][0]) for way, e in pairs for _ in sizes]
        whole = self._whole(ways, rows, np.tile(sizes, len(pairs)), 1)
        exchange = np.tile(exchanges, count)
        steady_s, cost = (column.reshape(len(pairs), -1) for column in (whole.steady_s, whole.cost))
        size = best(exchange, steady_s, cost)
        value = worth(exchange[:, None], steady_s, cost).min(axis=1).reshape(count, -1)
        beam = BEAM if len(self.case.costs.trainers) > 1 and self.case.policy.stream else 1
        behind = rivals * (BEAMS_GAIN if beam > 1 else 1.0)  # the values are those of one beam
        near = (value <= value.min(axis=0) + math.log(behind)).ravel() if rivals > 0 else np.zeros(len(pairs), bool)
        kept = [(way, e, cut) for k, (way, e) in enumerate(pairs) for cut in cuts[way][e][: None if near[k] else 1]]
        chosen = np.array([way * len(exchanges) + e for way, e, _ in kept])
        if beam == 1 and len(kept) == len(pairs):  # nothing that was not worked out
            return whole.rows(chosen * len(sizes) + size[chosen])
        return self._whole(ways, [(way, exchanges[e], cut) for way, e, cut in kept], sizes[size[chosen]], beam)

    def _whole(
        self, ways: Sequence[Dealt], rows: Sequence[tuple[int, float, TailChoice]], sizes: Numbers, beam: int
    ) -> Outlines:  # fmt: skip
        case, costs, policy = self.case, self.case.costs, self.case.policy
        steps = Generations.of(case, ways, rows)
        gpus = {name: limits.gpus for name, limits in costs.limits.items()}
        generate_gpus = steps.shards * gpus[GENERATE]
        room = Room.after(None if policy.colocated else costs.pool_gpus, gpus[GENERATE], steps.gone_s)
        if steps.tail_gone_s.shape[1]:
            room.promise(gpus[TAIL], steps.tail_gone_s, steps.open_s)
        parts = Parts.of(steps.finish_s, case.load.tokens[steps.numbers], sizes)
        beside = followers(case, steps, parts, room)
        paid = {GENERATE: steps.generate_s + costs.start_s[GENERATE] * steps.shards}
        if steps.tail_gone_s.shape[1]:
            paid[TAIL] = steps.tail_s
        paid |= {name: f.replica_s for name, f in beside.items()}
        batch, ready_s = ready(case, steps, parts, beside)
        room.begun(awaited_s(steps, batch, case.load.per_prompt))
        spent = _sum(costs.price, paid)
        gangs = trainers(case, steps.exchange, batch, ready_s, room, generate_gpus, spent, beam)
        paid |= {name: t.mean_replica_s for name, t in gangs.items()}
        replicas = {GENERATE: steps.shards} | {name: f.replicas for name, f in beside.items()}
        replicas |= {name: t.counts for name, t in gangs.items()}
        ends = [f.end_s for f in beside.values()] + [t.mean_end_s for t in gangs.values()]
        time_s = np.max([steps.finish_s[:, -1], *ends], axis=0) + costs.between_s
        prewarm = prewarmed(case, steps.exchange, replicas, gangs, generate_gpus)
        if policy.keep:
            paid |= {name: count * time_s for name, count in replicas.items()}
        cost, gpu_s = _sum(costs.price, paid), _sum(gpus, paid)
        if policy.colocated and costs.pool_gpus is not None:
            gpu_s = costs.pool_gpus * time_s
            cost = gpu_s * max(costs.price[n] / limit.gpus for n, limit in costs.limits.items() if limit.gpus)
        steady_s = time_s - case.delay_s + np.where(policy.keep | prewarm[GENERATE], 0.0, costs.start_s[GENERATE])
        tails = [tail for _, _, tail in rows]
        return Outlines(
            ways, tails, steps, sizes, beside, gangs, batch, prewarm, time_s, steady_s, cost, gpu_s, case.delay_s
        )


def _rows(table: Table, places: Numbers) -> Table:
    return type(table)(*(getattr(table, column.name)[places] for column in fields(table)))


def _sum(price: Mapping[str, float], seconds: Mapping[str, Array]) -> Array:
    found: Array = np.sum([price[name] * each for name, each in seconds.items()], axis=0)
    return found
