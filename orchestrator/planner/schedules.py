"""Fused pipeline schedules: actor and critic on the same nodes, in opposite directions, each in the other's bubbles.

RLHFuse (arXiv 2409.13221) section 5. The large model has one stage on each of the pp0 nodes, from node 0 up; the
small one runs from the last node down, as pp0 / pp1 replicas of pp1 stages, each with micro-batches of its own. A
schedule is, for each node, the order of its (model, forward | backward, micro-batch); list simulation gives its times:

    start = max(end of the same micro-batch's previous stage, end of the node's previous task);  backward = 2 x forward

Search: greedy list scheduling by priorities, then simulated annealing over the priorities. Every order that comes out
of list scheduling can be executed, so no deadlocked schedule is ever looked at.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


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


class _Problem:
    """Tasks as integers: along the chain of a micro-batch there are 2 pp tasks, forwards then backwards."""

    def __init__(self, p: Pipelines) -> None:
        self.p = p
        self.tasks: list[Task] = []
        self.node: list[int] = []
        self.length: list[int] = []
        self.next: list[int] = []
        self.heads: list[int] = []
        self.mem: list[float] = []
        for chain in range(1 + p.pp0 // p.pp1):
            pp, m, f, mem = (p.pp0, p.m0, p.f0, p.mem0) if chain == 0 else (p.pp1, p.m1, p.f1, p.mem1)
            for micro_batch in range(m):
                self.heads.append(len(self.tasks))
                for position in range(2 * pp):
                    backward = position >= pp
                    stage = 2 * pp - 1 - position if backward else position
                    node = stage if chain == 0 else chain * p.pp1 - 1 - stage
                    self.tasks.append(Task(chain, micro_batch, stage, backward))
                    self.node.append(node)
                    self.length.append(2 * f if backward else f)
                    self.mem.append(-mem if backward else mem)
                    self.next.append(len(self.tasks) if position < 2 * pp - 1 else -1)

    def simulate(self, priority: Sequence[float], patient: bool) -> tuple[int, list[list[int]]]:
        """List scheduling: an idle node takes the ready task of highest priority (smallest number) at once.

        A `patient` one waits instead when a task of higher priority is known to arrive (its previous stage runs
        already) before that one would end: the pipeline with priority is not held up by what fills its bubbles.
        """
        nodes = self.p.pp0
        ready: list[list[tuple[float, int]]] = [[] for _ in range(nodes)]
        for head in self.heads:
            heapq.heappush(ready[self.node[head]], (priority[head], head))
        orders: list[list[int]] = [[] for _ in range(nodes)]
        idle = [True] * nodes
        ends: list[tuple[int, int]] = []
        coming: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
        node_of, length, follow = self.node, self.length, self.next
        now = 0
        look = set(range(nodes))
        while True:
            for n in look:
                if not (idle[n] and ready[n]):
                    continue
                rank, task = ready[n][0]
                end = now + length[task]
                if patient and any(arrival < end and priority[other] < rank for arrival, other in coming[n]):
                    continue
                heapq.heappop(ready[n])
                orders[n].append(task)
                idle[n] = False
                heapq.heappush(ends, (end, task))
                after = follow[task]
                if after >= 0:
                    coming[node_of[after]].append((end, after))
            if not ends:
                return now, orders
            look = set()
            now = ends[0][0]
            while ends and ends[0][0] == now:
                task = heapq.heappop(ends)[1]
                n = node_of[task]
                idle[n] = True
                look.add(n)
                after = follow[task]
                if after >= 0:
                    coming[node_of[after]].remove((now, after))
                    heapq.heappush(ready[node_of[after]], (priority[after], after))
                    look.add(node_of[after])

    def peak_memory(self, orders: Sequence[Sequence[int]]) -> float:
        peak = 0.0
        for order in orders:
            held = 0.0
            for task in order:
                if self.mem[task] > 0:
                    held += self.mem[task]
                    peak = max(peak, held)
                else:
                    held += self.mem[task]
        return peak

    def schedule(self, priority: Sequence[float], patient: bool) -> FusedSchedule:
        makespan, orders = self.simulate(priority, patient)
        named = [[self.tasks[t] for t in order] for order in orders]
        return FusedSchedule(makespan, self.peak_memory(orders), named)

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


def simulate(p: Pipelines, orders: Sequence[Sequence[Task]]) -> int:
    """The makespan of given orders, whoever made them. Raises ValueError for one that deadlocks or lacks a task.

    An independent evaluation, in fixed orders; `_Problem.simulate` makes orders.
    """
    problem = _Problem(p)
    number = {(t, problem.node[i]): i for i, t in enumerate(problem.tasks)}
    queues = [[number[task, node] for task in order] for node, order in enumerate(orders)]
    if sorted(t for q in queues for t in q) != list(range(len(problem.tasks))):
        raise ValueError("a schedule has every stage of every micro-batch exactly once")
    before = {after: i for i, after in enumerate(problem.next) if after >= 0}
    end: dict[int, int] = {}
    at, idle = [0] * p.pp0, [0] * p.pp0
    moved = True
    while moved:
        moved = False
        for node, queue in enumerate(queues):
            while at[node] < len(queue):
                task = queue[at[node]]
                if task in before and before[task] not in end:
                    break
                start = max(idle[node], end[before[task]] if task in before else 0)
                idle[node] = end[task] = start + problem.length[task]
                at[node] += 1
                moved = True
    if any(at[node] < len(queue) for node, queue in enumerate(queues)):
        raise ValueError("the schedule deadlocks: a stage waits for one that is ordered after it")
    return max(idle)


def greedy(p: Pipelines) -> FusedSchedule:
    """The best of a few priority rules. Ties go to less memory."""
    problem = _Problem(p)
    found = [problem.schedule(problem.rule(*rule), patient) for rule in _rules(p) for patient in (False, True)]
    return min(found, key=lambda s: (s.makespan, s.peak_memory))


def _rules(p: Pipelines) -> list[tuple[float, float, float, float]]:
    total0, total1 = 3 * p.m0 * p.f0, 3 * p.m1 * p.f1
    return [
        (shift, depth, backward, spread)
        for shift in (-total1, -p.pp0 * p.f0, 0.0, p.pp0 * p.f0, total0)
        for depth in (0.0, 0.5, 1.0)
        for backward in (0.0, 3.0 * p.f0, 3.0 * p.pp0 * p.f0, float(10 * total0))
        for spread in (1.0, total0 / total1)
    ]


def anneal(p: Pipelines, *, evaluations: int = 6000, starts: int = 3, seed: int = 0) -> FusedSchedule:
    """Simulated annealing over the priorities from the best rules; stops at the lower bound.

    A move exchanges two tasks that follow each other on a node, or shifts one task, or a micro-batch on all nodes.
    The temperature falls geometrically from a hundredth of the makespan to a fifth of a time unit.
    """
    problem, dice, bound = _Problem(p), random.Random(seed), p.lower_bound
    first = [(problem.simulate(problem.rule(*rule), patient)[0], k, patient)
             for k, rule in enumerate(_rules(p)) for patient in (False, True)]  # fmt: skip
    best: tuple[int, list[float], bool] | None = None
    for cost, k, patient in sorted(first)[:starts]:
        walk = _Walk(problem, problem.rule(*_rules(p)[k]), patient, cost, dice)
        found = walk.run(evaluations // starts, bound)
        if best is None or found[0] < best[0]:
            best = (*found, patient)
        if best[0] <= bound:
            break
    assert best is not None, "there is at least one start"
    return problem.schedule(best[1], best[2])


class _Walk:
    """One annealing."""

    def __init__(self, problem: _Problem, priority: list[float], patient: bool, cost: int, dice: random.Random) -> None:
        self.problem, self.priority, self.patient, self.cost, self.dice = problem, priority, patient, cost, dice
        self.groups = _groups(problem)
        self.orders = problem.simulate(priority, patient)[1]

    def run(self, evaluations: int, bound: int) -> tuple[int, list[float]]:
        best = self.cost, list(self.priority)
        hot, cold = max(1.0, 0.01 * self.cost), 0.2
        for k in range(evaluations):
            if best[0] <= bound:
                break
            temperature = hot * (cold / hot) ** (k / evaluations)
            before = self._move()
            found, orders = self.problem.simulate(self.priority, self.patient)
            if found <= self.cost or self.dice.random() < math.exp((self.cost - found) / temperature):
                self.cost, self.orders = found, orders
                if found < best[0]:
                    best = found, list(self.priority)
            else:
                for task, value in before:
                    self.priority[task] = value
        return best

    def _move(self) -> list[tuple[int, float]]:
        """Changes the priorities; returns what they were."""
        dice, priority = self.dice, self.priority
        kind = dice.random()
        if kind < 0.4:
            order = self.orders[dice.randrange(len(self.orders))]
            at = dice.randrange(len(order) - 1)
            a, b = order[at], order[at + 1]
            before = [(a, priority[a]), (b, priority[b])]
            priority[a], priority[b] = max(priority[a], priority[b]) + 1e-3, min(priority[a], priority[b]) - 1e-3
            return before
        group = self.groups[dice.randrange(len(self.groups))] if kind < 0.7 else [dice.randrange(len(priority))]
        before = [(t, priority[t]) for t in group]
        shift = dice.gauss(0.0, 6.0 * max(self.problem.p.f0, self.problem.p.f1))
        for t in group:
            priority[t] += shift
        return before


def _groups(problem: _Problem) -> list[list[int]]:
    """Tasks that are shifted together: a micro-batch's forwards, its backwards, or both."""
    found: dict[tuple[int, int, bool], list[int]] = {}
    for i, task in enumerate(problem.tasks):
        found.setdefault((task.chain, task.micro_batch, task.backward), []).append(i)
    wholes = [found[c, m, False] + found[c, m, True] for c, m, backward in found if not backward]
    return [*found.values(), *wholes]
