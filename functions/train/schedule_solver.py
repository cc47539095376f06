"""Shorter fused schedules by OR-tools' CP-SAT, from one that is there: it is the hint.

    start of each task, of fixed length, in turn along its chain           no overlap on a node
    the micro-batches of a stage in turn, forwards and backwards           they are alike: the k-th to start can be k
    each held from its forward's start to its backward's end               a node's sum is at most the memory
The makespan is asked for in steps: at most bound + step K, K smallest, a step a third of the gap at first, then finer.
Asked for each unit, the solver goes down one by one, and every one of them takes it as long as the last.
"""

import math
from collections import defaultdict
from itertools import pairwise

from ortools.sat.python import cp_model

from functions.train.schedules import Problem, Starts

PARTS = 3
"""The gap is so many steps."""
UNITS = 100_000
"""Memory is counted in such parts of what the heavier model's micro-batch holds."""


def shorten(problem: Problem, starts: Starts, memory: float, bound: int, seconds: float) -> tuple[Starts, int]:
    """The shortest found in `seconds` of the solver's deterministic time, and `bound`, raised where more was proven."""
    best, step = starts, 0
    while (gap := problem.makespan(best) - bound) > 0 and seconds > 0.1:
        step = min(step, gap) if step else -(-gap // PARTS)
        given = seconds if step == 1 else seconds / 2
        found, proven, spent = _solve(problem, best, memory, bound, step, given)
        moved = problem.makespan(found) < problem.makespan(best) or proven > bound
        best, bound, seconds = found, proven, seconds - spent
        if step == 1 and not moved:
            break
        step = 0 if moved else -(-step // PARTS)
    return best, bound


def _solve(
    problem: Problem, starts: Starts, memory: float, bound: int, step: int, seconds: float
) -> tuple[Starts, int, float]:
    """(the shortest, the bound that is proven, deterministic seconds spent)."""
    model, tasks = cp_model.CpModel(), range(len(problem.tasks))
    length, makespan = problem.length, problem.makespan(starts)
    most = -(-(makespan - bound) // step)
    end = bound + step * most
    heads, tails = [0] * len(tasks), [0] * len(tasks)
    for task in tasks:
        if (first := problem.before[task]) >= 0:
            heads[task] = heads[first] + length[first]
    for task in reversed(tasks):
        tails[task] = length[task] + (tails[problem.next[task]] if problem.next[task] >= 0 else 0)
    begin = [model.new_int_var(heads[task], end - tails[task], "") for task in tasks]
    steps = model.new_int_var(0, most, "")
    stages, nodes = defaultdict[tuple[int, int, bool], list[int]](list), defaultdict[int, list[int]](list)
    for task, what in enumerate(problem.tasks):
        stages[what.chain, what.stage, what.backward].append(task)
        nodes[problem.node[task]].append(task)
        if problem.next[task] >= 0:
            model.add(begin[problem.next[task]] >= begin[task] + length[task])
        else:
            model.add(begin[task] + length[task] <= bound + step * steps)
    for stage in stages.values():
        for one, two in pairwise(stage):
            model.add(begin[two] >= begin[one] + length[one])
        for task, start in zip(stage, sorted(starts[task] for task in stage), strict=True):
            model.add_hint(begin[task], start)
    model.add_hint(steps, most)
    for own in nodes.values():
        model.add_no_overlap([model.new_fixed_size_interval_var(begin[task], length[task], "") for task in own])
        if memory < math.inf:
            _hold(model, problem, stages, own, begin, end, memory)
    model.minimize(steps)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.linearization_level = 1, 0
    solver.parameters.max_deterministic_time = seconds
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return starts, bound, spent
    least = round(solver.best_objective_bound)
    found = [solver.value(var) for var in begin]
    proven = bound + step * (least - 1) + 1 if least else bound
    return min(found, starts, key=problem.makespan), proven, spent


def _hold(
    model: cp_model.CpModel, problem: Problem, stages: dict[tuple[int, int, bool], list[int]], own: list[int],
    begin: list[cp_model.IntVar], end: int, memory: float,
) -> None:  # fmt: skip
    """What the node of the tasks `own` holds."""
    unit = max(problem.mem) / UNITS
    intervals, demands = [], []
    for chain, stage in dict.fromkeys((problem.tasks[task].chain, problem.tasks[task].stage) for task in own):
        forwards, backwards = stages[chain, stage, False], stages[chain, stage, True]
        held = problem.mem[forwards[0]]
        for forward, backward in zip(forwards, backwards, strict=True):
            size, over = model.new_int_var(0, end, ""), begin[backward] + problem.length[backward]
            intervals.append(model.new_interval_var(begin[forward], size, over, ""))
            demands.append(math.ceil(round(held / unit, 3)))
        alone = int(memory / held + 1e-9) if held else len(forwards)
        for backward, forward in zip(backwards, forwards[alone:], strict=False):
            model.add(begin[forward] >= begin[backward] + problem.length[backward])
    model.add_cumulative(intervals, demands, math.floor(round(memory / unit, 3)))
