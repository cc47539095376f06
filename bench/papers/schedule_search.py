"""Looks for the shortest fused schedule: list scheduling from many rules, to and fro in time, then tabu search.

    draw a rule -> list schedule -> forward-backward improvement, again and again        most cases end here
    the best few in turns: tabu search on the critical path -> forward-backward          until the budget is spent

Forward-backward improvement (Tormos and Lova, A competitive heuristic solution technique for resource-constrained
project scheduling, 2001) schedules the tasks in reversed time by their latest ends, then forwards by their earliest
starts: each pass closes gaps that the one before left. The tabu search is that of job shops (Nowicki and Smutnicki, A
fast taboo search algorithm for the job shop problem, 1996; insertions at the ends of critical blocks: Balas and
Vazacopoulos, 1998): only a move within a block of the critical path can shorten it. Both keep to a bound on the memory
of each node. The search ends at the lower bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

from bench.papers.schedules import FusedSchedule, Pipelines, Problem, Starts, peak

KEPT = 5
"""Schedules that tabu search takes turns with."""
TURN = 1500
"""Moves of one turn."""
SPAN, SAMPLED = 6, 24
"""How far a task is moved at most, and how many moves are looked at."""
STALLED = 800

Found = tuple[int, Starts]


def search(p: Pipelines, *, memory: float = math.inf, evaluations: int = 15_000, seed: int = 0) -> FusedSchedule:
    """The shortest schedule found in that many evaluations (each a pass over all tasks) with at most `memory` held on
    any node. Raises ValueError where no rule gets by with it.
    """
    problem, dice, bound = Problem.of(p), random.Random(seed), p.lower_bound
    budget = _Budget(evaluations)
    pool: list[Found] = []
    while budget.used < 0.3 * evaluations and not (pool and pool[0][0] <= bound):
        if (first := budget.spend(_drawn(problem, memory, dice))) is not None:
            pool = sorted([*pool, _to_and_fro(problem, first, memory, budget)], key=lambda found: found[0])[:KEPT]
    if not pool:
        raise ValueError(f"no rule gets by with a memory of {memory:g} (1F1B of the large model: {p.pp0 * p.mem0:g})")
    best, turn = pool[0], 0
    while best[0] > bound and not budget.spent:
        tabu = _Tabu(problem, pool[turn % len(pool)][1], memory, dice)
        moved = tabu.run(min(TURN, budget.left), bound)
        budget.used += tabu.moves
        pool[turn % len(pool)] = found = _to_and_fro(problem, moved, memory, budget)
        best, turn = min(best, found, key=lambda one: one[0]), turn + 1
    return problem.schedule(best[1])


class _Budget:
    def __init__(self, evaluations: int) -> None:
        self.evaluations, self.used = evaluations, 0

    @property
    def left(self) -> int:
        return self.evaluations - self.used

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def spend(self, found: Found | None) -> Found | None:
        self.used += 1
        return found


def _drawn(problem: Problem, memory: float, dice: random.Random) -> Found | None:
    """A schedule by a rule drawn at random, with as many micro-batches in flight at each stage as 1F1B has or more."""
    p = problem.p
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
    return problem.list_schedule(problem.rule(*rule), patient=dice.random() < 0.5, memory=memory, in_flight=in_flight)


def _to_and_fro(problem: Problem, found: Found, memory: float, budget: _Budget, rounds: int = 30) -> Found:
    """Forward-backward improvement until nothing was gained for eight rounds."""
    back, best, stalled = problem.reversed(), found, 0
    for _ in range(rounds):
        ends = [start + length for start, length in zip(found[1], problem.length, strict=True)]
        turned = budget.spend(back.list_schedule([-end for end in ends], memory=memory))
        if turned is None:
            break
        starts = [turned[0] - start - length for start, length in zip(turned[1], problem.length, strict=True)]
        forward = budget.spend(problem.list_schedule(starts, memory=memory))
        if forward is None:
            break
        found = forward
        stalled = 0 if found[0] < best[0] else stalled + 1
        best = min(best, found, key=lambda one: one[0])
        if stalled > 8 or best[0] <= problem.p.lower_bound:
            break
    return best


class _Tabu:
    """One tabu search over the orders of the nodes."""

    def __init__(self, problem: Problem, starts: Starts, memory: float, dice: random.Random) -> None:
        self.problem, self.memory, self.dice = problem, memory, dice
        self.forbidden: dict[tuple[int, int], int] = {}
        """Pairs that may not stand one right after the other (as they did before a move) until some move."""
        self.moves = 0
        self._load(problem.orders(starts))

    def run(self, moves: int, bound: int) -> Found:
        """The best that so many moves come by."""
        best, orders, stalled = (self.makespan, self.heads), [list(order) for order in self.orders], 0
        while self.moves < moves and best[0] > bound:
            self.moves += 1
            self._move(best[0])
            stalled += 1
            if self.makespan < best[0]:
                best, orders, stalled = (self.makespan, self.heads), [list(order) for order in self.orders], 0
            elif stalled > STALLED:
                self._load(orders)
                self.forbidden.clear()
                stalled = 0
        return best

    def _load(self, orders: Sequence[Sequence[int]]) -> None:
        self.orders = [list(order) for order in orders]
        count = len(self.problem.tasks)
        self.left, self.right = [-1] * count, [-1] * count
        for order in self.orders:
            for one, two in pairwise(order):
                self.right[one], self.left[two] = two, one
        assert self._evaluate(), "the orders of a schedule can be executed"

    def _evaluate(self) -> bool:
        """Heads (earliest starts), tails (longest way from a task's end to the last), makespan; false: a deadlock."""
        length, after, before = self.problem.length, self.problem.next, self.problem.before
        left, right, count = self.left, self.right, len(self.problem.tasks)
        waits = [(before[t] >= 0) + (left[t] >= 0) for t in range(count)]
        heads, sequence = [0] * count, [t for t in range(count) if not waits[t]]
        for task in sequence:  # grows
            end = heads[task] + length[task]
            for other in (after[task], right[task]):
                if other >= 0:
                    if heads[other] < end:
                        heads[other] = end
                    waits[other] -= 1
                    if not waits[other]:
                        sequence.append(other)
        if len(sequence) < count:
            return False
        tails = [0] * count
        for task in reversed(sequence):
            way = tails[task] + length[task]
            for other in (before[task], left[task]):
                if other >= 0 and tails[other] < way:
                    tails[other] = way
        self.heads, self.tails = heads, tails
        self.makespan = max(heads[task] + length[task] for task in sequence)
        return True

    def _move(self, best: int) -> None:
        """The most promising of some moves that is not forbidden (or would be better than `best`) and can be made."""
        scored = []
        for run, moved in self._candidates(self._critical_path()):
            estimate = self._estimate(run, moved)
            tabu = any(self.forbidden.get(pair, 0) >= self.moves for pair in pairwise(moved))
            scored.append(
                (estimate if not tabu or estimate < best else estimate + 10 * best, self.dice.random(), run, moved)
            )
        for _, _, run, moved in sorted(scored):
            order = self.orders[self.problem.node[run[0]]]
            self._replace(order, run, moved)
            if peak(order, self.problem.mem) <= self.memory + 1e-9 and self._evaluate():
                until = self.moves + self.dice.randint(6, 16)
                self.forbidden[run[0], run[1]] = self.forbidden[run[-2], run[-1]] = until
                return
            self._replace(order, moved, run)

    def _critical_path(self) -> list[int]:
        length, heads, tails = self.problem.length, self.heads, self.tails
        firsts = [order[0] for order in self.orders]
        task = self.dice.choice([t for t in firsts if heads[t] == 0 and length[t] + tails[t] == self.makespan])
        path = [task]
        while True:
            end = heads[task] + length[task]
            onward = [
                other
                for other in {self.problem.next[task], self.right[task]}
                if other >= 0 and heads[other] == end and end + length[other] + tails[other] == self.makespan
            ]
            if not onward:
                return path
            task = onward[0] if len(onward) == 1 else self.dice.choice(sorted(onward))
            path.append(task)

    def _candidates(self, path: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Runs of a node's order on the path, and what they may become: a task moved to the front or the end of its
        block, or the front or end task moved into it."""
        found: list[tuple[list[int], list[int]]] = []
        begin = 0
        while begin < len(path):
            stop = begin + 1
            while stop < len(path) and self.right[path[stop - 1]] == path[stop]:
                stop += 1
            block = list(path[begin:stop])
            for size in range(2, min(SPAN + 1, len(block)) + 1):
                if begin > 0:
                    front = block[:size]
                    found += [(front, [front[-1], *front[:-1]]), (front, [*front[1:], front[0]])]
                if stop < len(path):
                    end = block[-size:]
                    found += [(end, [end[-1], *end[:-1]]), (end, [*end[1:], end[0]])]
            begin = stop
        if len(found) > SAMPLED:
            found = self.dice.sample(found, SAMPLED)
        return [(run, moved) for run, moved in found if self._in_turn(moved)]

    def _in_turn(self, moved: Sequence[int]) -> bool:
        """Whether no task stands after one of its own micro-batch that needs it."""
        place = {task: k for k, task in enumerate(moved)}
        return all(place.get(self.problem.next[task], len(moved)) > k for task, k in place.items())

    def _estimate(self, run: Sequence[int], moved: Sequence[int]) -> int:
        """The longest way through the moved tasks, with the heads and tails of all others as they were."""
        length, heads, tails = self.problem.length, self.heads, self.tails
        before, after, first, last = self.problem.before, self.problem.next, self.left[run[0]], self.right[run[-1]]
        end = heads[first] + length[first] if first >= 0 else 0
        begins: list[int] = []
        for task in moved:
            if (other := before[task]) >= 0:
                end = max(end, heads[other] + length[other])
            begins.append(end)
            end += length[task]
        way = tails[last] + length[last] if last >= 0 else 0
        longest = 0
        for task, start in zip(reversed(moved), reversed(begins), strict=True):
            if (other := after[task]) >= 0:
                way = max(way, tails[other] + length[other])
            longest = max(longest, start + length[task] + way)
            way += length[task]
        return longest

    def _replace(self, order: list[int], run: Sequence[int], moved: Sequence[int]) -> None:
        left, right = self.left[run[0]], self.right[run[-1]]
        for one, two in pairwise([left, *moved, right]):
            if one >= 0:
                self.right[one] = two
            if two >= 0:
                self.left[two] = one
        at = order.index(run[0])
        order[at : at + len(run)] = moved
