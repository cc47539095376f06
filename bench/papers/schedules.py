"""Fused pipeline schedules: actor and critic on the same nodes, in opposite directions, each in the other's bubbles.

RLHFuse (arXiv 2409.13221) section 5. The large model has one stage on each of the pp0 nodes, from node 0 up; the
small one runs from the last node down, as pp0 / pp1 replicas of pp1 stages, each with micro-batches of its own. A
schedule is, for each node, the order of its (model, forward | backward, micro-batch); list simulation gives its times:

    start = max(end of the same micro-batch's previous stage, end of the node's previous task);  backward = 2 x forward

Here: the problem, list scheduling by priorities (`greedy`: a few rules), and an independent evaluation (`simulate`).
schedule_search.py looks for better ones. Every order that comes out of list scheduling can be executed, so no
deadlocked schedule is ever looked at.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


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

    @property
    def lower_bound(self) -> int:
        """No node can end before it has done its work and its work's way in and out.

        A node at depth k of the large pipeline begins at k f0 at the earliest unless the small one fills in, and the
        last backward has 2 k f0 to go to node 0; the small model the other way around.
        """
        work = 3 * (self.m0 * self.f0 + self.m1 * self.f1)
        bounds = [3 * (self.pp0 + self.m0 - 1) * self.f0, 3 * (self.pp1 + self.m1 - 1) * self.f1]
        for node in range(self.pp0):
            k0, k1 = node, self.pp1 - 1 - node % self.pp1
            first = min(k0 * self.f0, k1 * self.f1)
            last = min(2 * k0 * self.f0, 2 * k1 * self.f1)
            bounds.append(work + first + last)
        return max(bounds)


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


Starts = list[int]
"""When each task starts."""


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
    ) -> tuple[int, Starts] | None:  # fmt: skip
        """Makespan and starts: an idle node takes the ready task of highest priority (smallest number) at once.

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
                return (now, starts) if done == len(self.tasks) else None
            look, now = set(), ends[0][0]
            while ends and ends[0][0] == now:
                task = heapq.heappop(ends)[1]
                idle[node[task]] = True
                look.add(node[task])
                if (follower := after[task]) >= 0:
                    coming[node[follower]].remove((now, follower))
                    heapq.heappush(ready[node[follower]], (priority[follower], follower))
                    look.add(node[follower])

    def orders(self, starts: Starts) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.p.pp0)]
        for task in sorted(range(len(starts)), key=starts.__getitem__):
            found[self.node[task]].append(task)
        return found

    def schedule(self, starts: Starts) -> FusedSchedule:
        orders = self.orders(starts)
        makespan = max(start + length for start, length in zip(starts, self.length, strict=True))
        named = [[self.tasks[t] for t in order] for order in orders]
        return FusedSchedule(makespan, max(peak(order, self.mem) for order in orders), named)

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


def peak(order: Sequence[int], mem: Sequence[float]) -> float:
    """The most that a node holds over its order."""
    most = held = 0.0
    for task in order:
        held += mem[task]
        most = max(most, held)
    return most


def simulate(p: Pipelines, orders: Sequence[Sequence[Task]]) -> int:
    """The makespan of given orders, whoever made them. Raises ValueError for one that deadlocks or lacks a task.

    An independent evaluation, in fixed orders; `Problem.list_schedule` makes orders.
    """
    problem = Problem.of(p)
    number = {(t, problem.node[i]): i for i, t in enumerate(problem.tasks)}
    queues = [[number[task, node] for task in order] for node, order in enumerate(orders)]
    if sorted(t for q in queues for t in q) != list(range(len(problem.tasks))):
        raise ValueError("a schedule has every stage of every micro-batch exactly once")
    before = problem.before
    end: dict[int, int] = {}
    at, idle = [0] * p.pp0, [0] * p.pp0
    moved = True
    while moved:
        moved = False
        for node, queue in enumerate(queues):
            while at[node] < len(queue):
                task = queue[at[node]]
                if before[task] >= 0 and before[task] not in end:
                    break
                start = max(idle[node], end[before[task]] if before[task] >= 0 else 0)
                idle[node] = end[task] = start + problem.length[task]
                at[node] += 1
                moved = True
    if any(at[node] < len(queue) for node, queue in enumerate(queues)):
        raise ValueError("the schedule deadlocks: a stage waits for one that is ordered after it")
    return max(idle)


def greedy(p: Pipelines, *, memory: float = math.inf) -> FusedSchedule:
    """The best of a few priority rules. Ties go to less memory. Raises ValueError where none gets by with `memory`."""
    problem = Problem.of(p)
    tried = [
        problem.list_schedule(problem.rule(*rule), patient=patient, memory=memory)
        for rule in rules(p)
        for patient in (False, True)
    ]
    found = [problem.schedule(starts) for _, starts in filter(None, tried)]
    if not found:
        raise ValueError(f"no rule gets by with a memory of {memory:g} (1F1B of the large model: {p.pp0 * p.mem0:g})")
    return min(found, key=lambda s: (s.makespan, s.peak_memory))


def rules(p: Pipelines) -> list[tuple[float, float, float, float]]:
    total0, total1 = 3 * p.m0 * p.f0, 3 * p.m1 * p.f1
    return [
        (shift, depth, backward, spread)
        for shift in (-total1, -p.pp0 * p.f0, 0.0, p.pp0 * p.f0, total0)
        for depth in (0.0, 0.5, 1.0)
        for backward in (0.0, 3.0 * p.f0, 3.0 * p.pp0 * p.f0, float(10 * total0))
        for spread in (1.0, total0 / total1)
    ]
