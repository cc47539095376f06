"""Fused pipeline schedules on the authors' published cases; every schedule is evaluated again, independently."""

from __future__ import annotations

import pytest

from bench.papers.schedules import greedy, simulate
from functions.train.schedules import FusedSchedule, Pipelines, Problem, Task, search

# Published by RLHFuse's authors: (pipelines, serial, greedy, annealed, lower bound).
CASES = {
    0: (Pipelines(8, 4, 32, 16, 5, 4, 1.95, 2.0), 813, 741, 708, 708),
    2: (Pipelines(8, 4, 8, 4, 5, 4, 1.95, 2.0), 309, 239, 225, 225),
    3: (Pipelines(8, 8, 32, 32, 5, 2, 1.95, 1.0), 819, 755, 702, 702),
    5: (Pipelines(8, 8, 8, 8, 5, 2, 1.95, 1.0), 315, 225, 225, 225),
    6: (Pipelines(16, 8, 64, 32, 2, 2, 1.64, 2.0), 708, 632, 618, 618),
    8: (Pipelines(16, 8, 16, 8, 2, 2, 1.64, 2.0), 276, 214, 186, 186),
    9: (Pipelines(16, 16, 64, 64, 2, 1, 1.64, 1.0), 711, 651, 613, 606),
    10: (Pipelines(16, 16, 32, 32, 2, 1, 1.64, 1.0), 423, 363, 318, 318),
}


@pytest.mark.parametrize("case", CASES)
def test_serial_time_and_lower_bound_are_the_authors(case: int) -> None:
    pipelines, serial, _, _, bound = CASES[case]
    assert (pipelines.serial, pipelines.lower_bound()) == (serial, bound)


@pytest.mark.parametrize("case", [0, 2, 3, 5, 8, *(pytest.param(k, marks=pytest.mark.slow) for k in (6, 9, 10))])
def test_greedy_is_executable_and_at_least_as_short_as_the_authors(case: int) -> None:
    pipelines, _, published, _, bound = CASES[case]
    found = greedy(pipelines)
    assert simulate(pipelines, found.orders) == found.makespan
    assert bound <= found.makespan <= published


MEMORY = {0: 19.7, 2: 15.6, 3: 20.5, 5: 15.6, 6: 39.72, 8: 26.24, 9: 38.72, 10: 32.16}
"""The authors' best, after annealing on memory."""


def held(pipelines: Pipelines, found: FusedSchedule) -> float:
    """The most that any node holds, counted anew."""
    most = 0.0
    for order in found.orders:
        now = 0.0
        for task in order:
            now += (-1 if task.backward else 1) * (pipelines.mem1 if task.chain else pipelines.mem0)
            most = max(most, now)
    return most


@pytest.mark.parametrize("case", [0, 3, 5, 6, 9, 10])
def test_list_schedules_made_better_to_and_fro_reach_the_lower_bound(case: int) -> None:
    pipelines, _, _, published, bound = CASES[case]
    found = search(pipelines, solver_s=0)
    assert simulate(pipelines, found.orders) == found.makespan == found.bound == bound <= published
    assert found.peak_memory == pytest.approx(held(pipelines, found))


@pytest.mark.parametrize("case", [2, 5, *(pytest.param(k, marks=pytest.mark.slow) for k in (0, 3, 6, 8, 9, 10))])
def test_the_solver_reaches_it_within_the_authors_least_memory(case: int) -> None:
    pytest.importorskip("ortools", reason="OR-tools is not installed (extra `schedules`)")
    pipelines, _, _, _, bound = CASES[case]
    found = search(pipelines, memory=MEMORY[case])
    assert simulate(pipelines, found.orders) == found.makespan == found.bound == bound
    assert held(pipelines, found) <= MEMORY[case] + 1e-9
    assert search(pipelines, memory=MEMORY[case]) is found


def test_the_bound_counts_what_memory_allows_and_the_solver_proves_the_rest() -> None:
    """Two micro-batches at a time do not fill four stages."""
    pipelines = Pipelines(4, 2, 4, 2, 2, 1, mem0=1.0, mem1=1.0)
    assert pipelines.lower_bound() < pipelines.lower_bound(2.0)
    found = search(pipelines, memory=2.0, solver_s=0)
    assert found.bound == pipelines.lower_bound(2.0) < found.makespan == simulate(pipelines, found.orders)
    pytest.importorskip("ortools", reason="OR-tools is not installed (extra `schedules`)")
    proven = search(pipelines, memory=2.0)
    assert found.bound < proven.bound == proven.makespan <= found.makespan


def test_less_memory_than_one_micro_batch_is_refused() -> None:
    for find in (greedy, search):
        with pytest.raises(ValueError, match=r"memory of 1 \(1F1B of the large model: 15.6\)"):
            find(CASES[2][0], memory=1.0)


def test_time_reversed_twice_is_time() -> None:
    problem = Problem.of(Pipelines(4, 2, 6, 3, 2, 1, 1.0, 1.0))
    assert problem.reversed().reversed() == problem
    backward = problem.reversed().list_schedule([0.0] * len(problem.tasks))
    assert backward is not None
    whole = problem.makespan(backward)
    turned = [whole - start - length for start, length in zip(backward, problem.length, strict=True)]
    assert simulate(problem.p, problem.schedule(turned, 0).orders) <= whole


def test_one_pipeline_alone_is_1f1b() -> None:
    # The small model does next to nothing: what is left is 1F1B of the large one, (m + pp - 1) 3 f.
    pipelines = Pipelines(4, 4, 8, 1, 100, 1)
    assert greedy(pipelines).makespan >= 3 * (8 + 4 - 1) * 100
    assert greedy(pipelines).makespan <= 3 * (8 + 4 - 1) * 100 + 3 * 4


def test_memory_counts_from_forward_to_backward() -> None:
    found = greedy(Pipelines(1, 1, 1, 1, 1, 1, mem0=2.0, mem1=3.0))
    assert found.makespan == 6
    assert found.peak_memory in (3.0, 5.0)


def test_deadlocks_and_missing_tasks_are_refused() -> None:
    pipelines = Pipelines(1, 1, 1, 1, 1, 1)
    f0, b0 = Task(0, 0, 0, False), Task(0, 0, 0, True)
    f1, b1 = Task(1, 0, 0, False), Task(1, 0, 0, True)
    assert simulate(pipelines, [[f0, f1, b1, b0]]) == 6
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(pipelines, [[b0, f0, f1, b1]])
    with pytest.raises(ValueError, match="exactly once"):
        simulate(pipelines, [[f0, b0, f1]])
    with pytest.raises(ValueError, match="pp0 = 8 must be a multiple of pp1 = 3"):
        Pipelines(8, 3, 1, 1, 1, 1)
