"""What RLHFuse's paper compares a fused schedule with (functions/train/schedules.py finds it): list scheduling by a
few rules (`greedy`), and the evaluation of any given orders, whoever made them (`simulate`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from functions.train.schedules import FusedSchedule, Pipelines, Problem, Task


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
    found = [problem.schedule(starts, p.lower_bound(memory)) for starts in tried if starts is not None]
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
