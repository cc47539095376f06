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

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import GENERATE, TAIL, PlannedStage
from orchestrator.planner.beside import awaited_s, followers, ready
from orchestrator.planner.case import Case
from orchestrator.planner.cuts import Cuts, Dealt
from orchestrator.planner.fusion import Follower, Parts, micro_batches
from orchestrator.planner.generation import Generations
from orchestrator.planner.prewarm import prewarmed
from orchestrator.planner.ranks import BEAM, trainers
from orchestrator.planner.room import Room
from orchestrator.planner.tail import TailChoice
from orchestrator.planner.training import Batch, Gangs, Trainer

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

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
    stages: Sequence[PlannedStage]
    open_s: float
    """When the tail function's replicas are asked for."""


@dataclass(frozen=True)
class _Whole:
    """R steps to their ends. [R] each"""

    steps: Generations
    micro_batch: Numbers
    followers: Mapping[str, Follower]
    trainers: Mapping[str, Gangs]
    batch: Batch
    prewarm: Mapping[str, Flags]
    time_s: Array
    steady_s: Array
    cost: Array
    gpu_s: Array


class Outliner:
    """Makes the choices that the case's policy leaves open."""

    def __init__(self, case: Case) -> None:
        self.case, self.cuts = case, Cuts(case)

    def outlines(self, ways: Sequence[Dealt], *, rivals: float = RIVALS) -> list[Outline]:
        """The best step with each way to deal the samples: with the most promising cut of its tail; of the ways that
        are then within `rivals` of the best one, with any.
        """
        cuts = [self.cuts.of(dealt) for dealt in ways]
        sizes, rows = np.array(micro_batches(len(self.case.load.tokens))), np.arange(len(ways))
        whole = self._whole(
            Generations.of(self.case, ways, [(way, tails[0]) for way, tails in enumerate(cuts) for _ in sizes]),
            np.tile(sizes, len(ways)), 1,
        )  # fmt: skip
        steady_s, cost = (column.reshape(len(ways), -1) for column in (whole.steady_s, whole.cost))
        best = self.case.goal.best(steady_s, cost)
        value = self.case.goal.rank(steady_s[rows, best], cost[rows, best])[0]
        near = value <= rivals * value.min()
        tails = [(way, tail) for way, found in enumerate(cuts) for tail in (found if near[way] else found[:1])]
        steps = Generations.of(self.case, ways, tails)
        beam = BEAM if len(self.case.costs.trainers) > 1 and self.case.policy.stream else 1
        whole = self._whole(steps, sizes[best][steps.way], beam)
        outlines = []
        for way, dealt in enumerate(ways):
            of = np.flatnonzero(steps.way == way)
            row = int(of[self.case.goal.best(whole.steady_s[of], whole.cost[of])])
            outlines.append(self._outline(dealt.shards, tails[row][1], whole, row))
        return outlines

    def _whole(self, steps: Generations, sizes: Numbers, beam: int) -> _Whole:
        case, costs, policy = self.case, self.case.costs, self.case.policy
        gpus = {name: limits.gpus for name, limits in costs.limits.items()}
        generate_gpus = steps.shards * gpus[GENERATE]
        room = Room.after(None if policy.colocated else costs.pool_gpus, gpus[GENERATE], steps.gone_s)
        if steps.tail_gone_s.shape[1]:
            room.promise(gpus[TAIL], steps.tail_gone_s, steps.open_s)
        parts = Parts.of(steps.finish_s, case.load.tokens[steps.numbers], sizes)
        beside = followers(case, parts, steps.finish_s[:, -1], room)
        paid = {GENERATE: steps.generate_s + costs.start_s[GENERATE] * steps.shards}
        if steps.tail_gone_s.shape[1]:
            paid[TAIL] = steps.tail_s
        paid |= {name: f.replica_s for name, f in beside.items()}
        batch, ready_s = ready(case, steps, parts, beside)
        room.begun(awaited_s(steps, batch, case.load.per_prompt))
        gangs = trainers(case, batch, ready_s, room, generate_gpus, _sum(costs.price, paid), beam)
        paid |= {name: t.replica_s for name, t in gangs.items()}
        replicas = {GENERATE: steps.shards} | {name: f.replicas for name, f in beside.items()}
        replicas |= {name: t.counts for name, t in gangs.items()}
        ends = [f.end_s for f in beside.values()] + [t.end_s for t in gangs.values()]
        time_s = np.max([steps.finish_s[:, -1], *ends], axis=0) + costs.between_s
        prewarm = prewarmed(case, replicas, gangs, generate_gpus)
        if policy.keep:
            paid |= {name: count * time_s for name, count in replicas.items()}
        cost, gpu_s = _sum(costs.price, paid), _sum(gpus, paid)
        if policy.colocated and costs.pool_gpus is not None:
            gpu_s = costs.pool_gpus * time_s
            cost = gpu_s * max(costs.price[n] / limit.gpus for n, limit in costs.limits.items() if limit.gpus)
        steady_s = time_s - case.delay_s + np.where(policy.keep | prewarm[GENERATE], 0.0, costs.start_s[GENERATE])
        return _Whole(steps, sizes, beside, gangs, batch, prewarm, time_s, steady_s, cost, gpu_s)

    def _outline(self, shards: Sequence[Sequence[int]], tail: TailChoice, whole: _Whole, row: int) -> Outline:
        trainers = {name: gang.trainer(row, whole.batch) for name, gang in whole.trainers.items()}
        stages = [PlannedStage(GENERATE, self.case.delay_s, float(whole.steps.gone_s[row, -1]))]
        if tail.function == TAIL:
            stages.append(PlannedStage(TAIL, tail.begin_s + self.case.delay_s, max(tail.ends_s) + self.case.delay_s))
        for name, follower in whole.followers.items():
            stages.append(PlannedStage(name, float(follower.begin_s[row]), float(follower.end_s[row])))
        stages += [PlannedStage(name, t.call_s, t.end_s) for name, t in trainers.items()]
        return Outline(
            shards=shards,
            tail=tail,
            micro_batch=int(whole.micro_batch[row]),
            followers={name: int(f.replicas[row]) for name, f in whole.followers.items()},
            trainers=trainers,
            prewarm=frozenset(name for name, ahead in whole.prewarm.items() if ahead[row]),
            generated_s=float(whole.steps.finish_s[row, -1]),
            time_s=float(whole.time_s[row]),
            steady_s=float(whole.steady_s[row]),
            cost=float(whole.cost[row]),
            gpu_s=float(whole.gpu_s[row]),
            stages=stages,
            open_s=tail.open_s + self.case.delay_s,
        )


def _sum(price: Mapping[str, float], seconds: Mapping[str, Array]) -> Array:
    found: Array = np.sum([price[name] * each for name, each in seconds.items()], axis=0)
    return found
