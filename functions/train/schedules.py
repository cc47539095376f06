"""Fused pipeline schedules: actor and critic on the same nodes, in opposite directions, each in the other's bubbles.

RLHFuse (arXiv 2409.13221) section 5. The large model has one stage on each of the pp0 nodes, from node 0 up; the
small one runs from the last node down, as pp0 / pp1 replicas of pp1 stages, each with micro-batches of its own. A
schedule is, for each node, the order of its (model, forward | backward, micro-batch):

    start = max(end of the same micro-batch's previous stage, end of the node's previous task);  backward = 2 x forward

`search` schedules by priority rules drawn at random, then by the best one's starts with noise, and makes each schedule
better to and fro in time (forward-backward improvement: Tormos and Lova, A competitive heuristic solution technique for
resource-constrained project scheduling, 2001): tasks in reversed time by their latest ends, then forwards by their
earliest starts; each pass closes gaps that the one before left. What is then above the lower bound goes to a solver
(schedule_solver.py). No torch here.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

DRAWS, RULES = 300, 25
"""Schedules made before the solver is asked, and how many of them by rules."""
SOLVER_S = 8.0
"""CP-SAT's deterministic seconds that a search may take: 10 to 30 of a CPU."""

Starts = list[int]
"""When each task starts."""


@dataclass(frozen=True)
class Pipelines:
    """pp: stages; m: micro-batches of each replica; f: seconds of one forward stage; mem: held per micro-batch."""

    pp0: int
    pp1: int
    m0: int
    m1: int
    f0: int
    f1: int
    mem0: float = 0.0
    mem1: float = 0.0

    def __post_init__(self) -> None:
        if min(self.pp0, self.pp1, self.m0, self.m1, self.f0, self.f1) < 1 or self.pp0 % self.pp1:
            raise ValueError(f"pp0 = {self.pp0} must be a multiple of pp1 = {self.pp1}, and all counts at least 1")

    @property
    def serial(self) -> int:
        """Makespan of the two 1F1B schedules one after the other: (m + pp - 1) 3 f each."""
        return 3 * ((self.m0 + self.pp0 - 1) * self.f0 + (self.m1 + self.pp1 - 1) * self.f1)

    def lower_bound(self, memory: float = math.inf) -> int:
        """No node can end before it has done its work and its work's way in and out, nor hold more than `memory`.

        A node at depth k of the large pipeline begins at k f0 at the earliest unless the small one fills in, and the
        last backward has 2 k f0 to go to node 0; the small model the other way around. Of each micro-batch it holds
        mem from its forward's start to its backward's end, at least 3 (pp - k) f.
        """
        bounds = [3.0 * (self.pp0 + self.m0 - 1) * self.f0, 3.0 * (self.pp1 + self.m1 - 1) * self.f1]
        for node in range(self.pp0):
            k0, k1 = node, self.pp1 - 1 - node % self.pp1
            way = min(k0 * self.f0, k1 * self.f1) + min(2 * k0 * self.f0, 2 * k1 * self.f1)
            large, small = 3 * (self.pp0 - k0) * self.f0, 3 * (self.pp1 - k1) * self.f1
            held = self.m0 * self.mem0 * large + self.m1 * self.mem1 * small
            bounds += [3 * (self.m0 * self.f0 + self.m1 * self.f1) + way, held / memory + way - 1e-6]
        return math.ceil(max(bounds))


@dataclass(frozen=True)
class Task:
    """One stage of one micro-batch. `chain`: which pipeline (0 large, 1.. replicas of the small)."""

    chain: int
    micro_batch: int
    stage: int
    backward: bool


@dataclass(frozen=True)
class FusedSchedule:
    makespan: int
    peak_memory: float
    """Largest on any node, activations of both models."""
    orders: Sequence[Sequence[Task]]
    """By node, in the order of execution."""
    bound: int
    """What no schedule can beat; the schedule is the shortest where it is its makespan."""


@dataclass(frozen=True)
class Problem:
    """Tasks as integers: along the chain of a micro-batch there are 2 pp tasks, forwards then backwards."""

    p: Pipelines
    tasks: Sequence[Task]
    node: Sequence[int]
    length: Sequence[int]
    next: Sequence[int]
    """Of the same micro-batch; -1: none."""
    before: Sequence[int]
    mem: Sequence[float]
    """What a node holds more when the task starts (a forward); less (a backward)."""

    @classmethod
    def of(cls, p: Pipelines) -> Problem:
        tasks: list[Task] = []
        node, length, after, before = list[int](), list[int](), list[int](), list[int]()
        mem: list[float] = []
        for chain in range(1 + p.pp0 // p.pp1):
            pp, m, f, held = (p.pp0, p.m0, p.f0, p.mem0) if chain == 0 else (p.pp1, p.m1, p.f1, p.mem1)
            for micro_batch in range(m):
                for position in range(2 * pp):
                    backward = position >= pp
                    stage = 2 * pp - 1 - position if backward else position
                    before.append(len(tasks) - 1 if position else -1)
                    after.append(len(tasks) + 1 if position < 2 * pp - 1 else -1)
                    tasks.append(Task(chain, micro_batch, stage, backward))
                    node.append(stage if chain == 0 else chain * p.pp1 - 1 - stage)
                    length.append(2 * f if backward else f)
                    mem.append(-held if backward else held)
        return cls(p, tasks, node, length, after, before, mem)

    def reversed(self) -> Problem:
        """The same with time running backwards: a backward takes up what its forward then lets go."""
        return replace(self, next=self.before, before=self.next, mem=[-m for m in self.mem])

    def list_schedule(
        self, priority: Sequence[float], *, patient: bool = False, memory: float = math.inf,
        in_flight: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Starts | None:  # fmt: skip
        """Starts: an idle node takes the ready task of highest priority (smallest number) at once.

        A `patient` one waits instead when a task of higher priority is known to arrive (its previous stage runs
        already) before that one would end: the pipeline with priority is not held up by what fills its bubbles. A
        forward waits while the node would hold more than `memory`, or at its stage more micro-batches than `in_flight`
        (of the large model, of the small) allows. None: they wait for each other forever.
        """
        nodes, node, length, after, mem = self.p.pp0, self.node, self.length, self.next, self.mem
        small = [task.chain > 0 for task in self.tasks]
        ready: list[list[tuple[float, int]]] = [[] for _ in range(nodes)]
        for task, first in enumerate(self.before):
            if first < 0:
                heapq.heappush(ready[node[task]], (priority[task], task))
        starts = [0] * len(self.tasks)
        held, flying = [0.0] * nodes, ([0] * nodes, [0] * nodes)
        idle, ends, done, now = [True] * nodes, list[tuple[int, int]](), 0, 0
        coming: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
        look = set(range(nodes))
        while True:
            for n in look:
                if not (idle[n] and ready[n]):
                    continue
                waits: list[tuple[float, int]] = []
                chosen = -1
                while ready[n] and chosen < 0:
                    rank, task = heapq.heappop(ready[n])
                    full = mem[task] > 0 and (
                        held[n] + mem[task] > memory + 1e-9
                        or (
                            in_flight is not None
                            and flying[small[task]][n] >= in_flight[small[task]][self.tasks[task].stage]
                        )
                    )
                    if full:
                        waits.append((rank, task))
                    elif patient and any(at < now + length[task] and priority[other] < rank for at, other in coming[n]):
                        waits.append((rank, task))
                        break
                    else:
                        chosen = task
                for item in waits:
                    heapq.heappush(ready[n], item)
                if chosen < 0:
                    continue
                held[n] += mem[chosen]
                flying[small[chosen]][n] += 1 if mem[chosen] > 0 else -1
                starts[chosen], idle[n], done = now, False, done + 1
                heapq.heappush(ends, (now + length[chosen], chosen))
                if after[chosen] >= 0:
                    coming[node[after[chosen]]].append((now + length[chosen], after[chosen]))
            if not ends:
                return starts if done == len(self.tasks) else None
            look, now = set(), ends[0][0]
            while ends and ends[0][0] == now:
                task = heapq.heappop(ends)[1]
                idle[node[task]] = True
                look.add(node[task])
                if (follower := after[task]) >= 0:
                    coming[node[follower]].remove((now, follower))
                    heapq.heappush(ready[node[follower]], (priority[follower], follower))
                    look.add(node[follower])

    def makespan(self, starts: Starts) -> int:
        return max(start + length for start, length in zip(starts, self.length, strict=True))

    def schedule(self, starts: Starts, bound: int) -> FusedSchedule:
        orders: list[list[int]] = [[] for _ in range(self.p.pp0)]
        for task in sorted(range(len(starts)), key=starts.__getitem__):
            orders[self.node[task]].append(task)
        named = [[self.tasks[t] for t in order] for order in orders]
        return FusedSchedule(self.makespan(starts), max(peak(order, self.mem) for order in orders), named, bound)

    def rule(self, large_first: float, depth: float, backward: float, spread: float) -> list[float]:
        """Priorities: earlier micro-batches first; `large_first` shifts the small model's, `backward` favours draining
        (1F1B), `depth` favours tasks with a long way to go, `spread` stretches the small model's micro-batches."""
        p, values = self.p, []
        for task in self.tasks:
            small = task.chain > 0
            pp, f = (p.pp1, p.f1) if small else (p.pp0, p.f0)
            to_go = 2 * (task.stage + 1) * f if task.backward else (3 * pp - task.stage) * f
            turn = task.micro_batch * (3 * p.f1 * spread if small else 3 * p.f0)
            values.append(turn + (large_first if small else 0.0) - backward * task.backward - depth * to_go)
        return values

    def drawn(self, memory: float, dice: random.Random) -> Starts | None:
        """By a rule drawn at random, with as many micro-batches in flight at each stage as 1F1B has or more."""
        p = self.p
        total0, total1 = 3 * p.m0 * p.f0, 3 * p.m1 * p.f1
        rule = (
            dice.choice([-total1, -p.pp0 * p.f0, 0, p.pp0 * p.f0, total0, dice.uniform(-total1, total0)]),
            dice.choice([0.0, 0.5, 1.0, dice.uniform(0.0, 2.0)]),
            dice.choice([0, 3 * p.f0, 3 * p.pp0 * p.f0, 10 * total0]),
            dice.choice([1.0, total0 / total1, dice.uniform(0.5, 2.0) * total0 / total1]),
        )

        def stages(pp: int) -> list[int]:
            slope, more = dice.choice([0.5, 1, 1, 1.5, 2]), dice.choice([0, 0, 1, 2, 3, 4, 8])
            return [max(1, round(slope * (pp - stage))) + more for stage in range(pp)]

        in_flight = stages(p.pp0), stages(p.pp1)
        return self.list_schedule(self.rule(*rule), patient=dice.random() < 0.5, memory=memory, in_flight=in_flight)

    def near(self, starts: Starts, memory: float, dice: random.Random) -> Starts | None:
        """By `starts`, each later by up to some micro-batches of the large model."""
        noise = dice.choice([0.25, 0.5, 1, 2, 4]) * 3 * self.p.f0
        return self.list_schedule([start + dice.uniform(0, noise) for start in starts], memory=memory)

    def to_and_fro(self, starts: Starts, memory: float, bound: int, rounds: int = 30) -> Starts:
        """Forward-backward improvement until nothing was gained for eight rounds."""
        back, best, stalled = self.reversed(), starts, 0
        for _ in range(rounds):
            turned = back.list_schedule(
                [-start - length for start, length in zip(starts, self.length, strict=True)], memory=memory
            )
            if turned is None:
                break
            forward = self.list_schedule([-t - n for t, n in zip(turned, self.length, strict=True)], memory=memory)
            if forward is None:
                break
            starts = forward
            stalled = 0 if self.makespan(starts) < self.makespan(best) else stalled + 1
            best = min(best, starts, key=self.makespan)
            if stalled > 8 or self.makespan(best) <= bound:
                break
        return best


def peak(order: Sequence[int], mem: Sequence[float]) -> float:
    """The most that a node holds over its order."""
    most = held = 0.0
    for task in order:
        held += mem[task]
        most = max(most, held)
    return most


@cache
def search(
    p: Pipelines, *, memory: float = math.inf, draws: int = DRAWS, solver_s: float = SOLVER_S, seed: int = 0
) -> FusedSchedule:
    """The shortest schedule found with at most `memory` held on any node; the same for the same shape, found once.

    Raises ValueError where no rule gets by with it. Without OR-tools (the extra `schedules`) it is the list schedule.
    """
    problem, dice, bound = Problem.of(p), random.Random(seed), p.lower_bound(memory)
    best: Starts | None = None
    for number in range(draws):
        first = problem.drawn(memory, dice) if best is None or number < RULES else problem.near(best, memory, dice)
        if first is not None:
            found = problem.to_and_fro(first, memory, bound)
            best = found if best is None else min(found, best, key=problem.makespan)
            if problem.makespan(best) <= bound:
                break
    if best is None:
        raise ValueError(f"no rule gets by with a memory of {memory:g} (1F1B of the large model: {p.pp0 * p.mem0:g})")
    if problem.makespan(best) > bound and solver_s > 0:
        try:
            from functions.train.schedule_solver import shorten
        except ImportError:
            _say_once()
        else:
            best, bound = shorten(problem, best, memory, bound, solver_s)
    return problem.schedule(best, bound)


@cache
def _say_once() -> None:
    logging.getLogger(__name__).warning(
        "fused schedules are list schedules here: OR-tools is not installed (extra `schedules`)"
    )
