"""A step whose samples have turns, on the real loop in virtual time: no GPU waits for a tool, nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.commands.simulate import not_waited_s, outcome_table
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import Goal
from orchestrator.simulation.baselines import SERVERFUL
from orchestrator.simulation.job import Outcome, simulate
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.scenarios import agents


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return replace(agents(), gpus=4, prompts_per_step=6, train_gpus=4, steps=2)


@pytest.fixture(scope="module")
def held(scenario: Scenario) -> Outcome:
    return simulate(scenario, SERVERFUL, deterministic=True)


def test_gpus_are_let_go_while_tools_work(scenario: Scenario, held: Outcome) -> None:
    """In the second step, when it knows how long they take."""
    found = simulate(scenario, ADAPTIVE, deterministic=True)
    assert found.history == held.history, "who works when changes no sample"
    assert found.gpu_s[1] <= 0.6 * held.gpu_s[1]
    assert found.step_s[1] <= 1.5 * held.step_s[1]
    for step in found.plans:
        [waits] = step.report.waits.values()
        assert 2 <= min(waits.turns) <= max(waits.turns) <= 8
        assert max(waits.answer_s) <= max(waits.total_s)
    assert found.plans[-1].plan.waits, "learned"
    assert not found.plans[0].plan.waits


def test_a_replica_that_generates_is_cut_for_what_waits_beside_it(scenario: Scenario) -> None:
    """One replica, tools that answer at once: it takes answered samples in without waiting for its slowest turn."""
    quick = replace(scenario.lengths, median_s=0.01, p99_s=0.02)  # type: ignore[type-var]
    found = simulate(replace(scenario, lengths=quick, steps=2), ADAPTIVE, goal=Goal("cost"))
    calls = [call for call in found.plans[-1].report.calls if call.function == "generate"]
    assert found.plans[-1].plan.chosen == 1
    assert len(calls) > 8, "more than one for each turn"
    assert len({call.replica for call in calls}) == 1


def test_tools_overlap_in_one_replica_of_the_environment(scenario: Scenario) -> None:
    """As well as with a replica for each episode: a slow answer holds up no other."""
    small = replace(scenario, steps=1)
    apart, one = (
        simulate(replace(small, environments=environments), SERVERFUL, deterministic=True)
        for environments in ((24, 1), (1, 24))
    )
    assert one.history == apart.history
    assert one.step_s[0] <= 1.02 * apart.step_s[0]
    calls = sum(call.function == "environment" for call in one.plans[0].report.calls)
    assert calls < sum(call.function == "environment" for call in apart.plans[0].report.calls)


def test_simulate_tells_what_did_not_wait_for_tools(scenario: Scenario, held: Outcome) -> None:
    found = simulate(replace(scenario, steps=1), ADAPTIVE)
    spared = not_waited_s(scenario, found)
    assert 0 < spared < found.plans[0].plan.replicas["generate"] * found.step_s[0]
    assert not_waited_s(scenario, held) == 0, "all GPUs are held"
    assert "not held for tools" in str([c.header for c in outcome_table(scenario, [held, found]).columns])
