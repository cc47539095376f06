"""Tails on replicas of more GPUs, in whole simulated jobs: nothing is lost, nothing is learned otherwise, the pool is
never exceeded, nobody waits for ever."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.base.errors import ConfigError
from orchestrator.planner.base import TAIL
from orchestrator.planner.devices import device, shape
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import Goal
from orchestrator.simulation.baselines import SERVERFUL
from orchestrator.simulation.job import Outcome, simulate
from orchestrator.simulation.lengths import Lognormal
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.scenarios import find_scenario

LONG = Scenario(
    "long", device("L40S"), shape("Qwen2.5-7B"), 8, "grpo", Lognormal.of(250, 0.9), prompts_per_step=12,
    samples_per_prompt=4, max_response_length=2048, train_gpus=4, epoch_steps=2, steps=4, tail_gpus=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def wide() -> Outcome:
    return simulate(LONG, ADAPTIVE, goal=Goal("speed"))


def most_gpus(outcome: Outcome, scenario: Scenario) -> int:
    """At any time: replicas that start or run, by the GPUs of each; but for those of steps in which they take turns."""
    gpus = {spec.name: spec.gpus for spec in scenario.specs(ADAPTIVE)}
    turns = [(step.start_s, step.stop_s) for step in outcome.plans if step.plan.turns]
    own = [u for u in outcome.usage if not any(start_s <= u.started_s < stop_s for start_s, stop_s in turns)]
    changes = [(u.started_s, gpus[u.function]) for u in own]
    changes += [(u.stopped_s or float("inf"), -gpus[u.function]) for u in own]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def test_long_responses_end_on_more_gpus_and_the_step_sooner(wide: Outcome) -> None:
    assert any(step.plan.tail == TAIL for step in wide.plans)
    assert any(u.function == TAIL for u in wide.usage)
    narrow = simulate(replace(LONG, tail_gpus=None), ADAPTIVE, goal=Goal("speed"))
    assert sum(wide.step_s) < 0.9 * sum(narrow.step_s)
    for with_it, without in zip(wide.plans, narrow.plans, strict=True):
        assert with_it.report.lengths == without.report.lengths  # every sample came back as long as it is


def test_the_tail_s_time_is_charged_as_it_is(wide: Outcome) -> None:
    """Each call: 0.1 s, the weights over four links (before it where they could be), keys and values of what was cut
    (57344 bytes a token) too, and at least the roofline's step for each token of its longest.
    """
    found = LONG.models(ADAPTIVE)[TAIL]
    assert found.start_s == 2.0
    calls = [call for step in wide.plans for call in step.report.calls if call.function == TAIL]
    assert calls
    for call in calls:
        stats = call.stats
        assert stats["load_s"] + stats["loaded_ahead_s"] == pytest.approx(15.232 / 25.0)
        assert call.work_s >= 0.1 + stats["load_s"] + stats["moved_s"] + stats["decode_steps"] * 0.0076 - 1e-6
        came = stats["moved_tokens"] + stats["prefill_tokens"] + stats["shared_tokens"]
        assert came > call.prompt_tokens  # tokens made so far too
        assert stats["moved_s"] == pytest.approx(stats["moved_tokens"] * 57344 / 25e9)
    assert sum(call.stats["moved_tokens"] for call in calls) > sum(call.stats["prefill_tokens"] for call in calls)
    assert any(call.stats["load_s"] == 0.0 for call in calls)


def test_learning_is_the_same_with_and_without() -> None:
    histories = [
        simulate(replace(LONG, tail_gpus=tail), ADAPTIVE, goal=Goal("speed"), deterministic=True).history
        for tail in (4, None)
    ]
    assert histories[0] == histories[1]


@settings(max_examples=12)
@given(
    st.sampled_from(["grpo", "ppo"]), st.sampled_from([8, 12, 16]), st.sampled_from([2, 4]), st.floats(0.3, 1.1),
    st.sampled_from([Goal("speed"), Goal("knee"), Goal("cost")]), st.integers(0, 99),
)  # fmt: skip
def test_no_pool_is_exceeded_and_no_job_waits_for_ever(
    recipe: str, gpus: int, tail_gpus: int, sigma: float, goal: Goal, seed: int
) -> None:
    scenario = replace(
        LONG, recipe=recipe, gpus=gpus, tail_gpus=tail_gpus, train_gpus=None, steps=3, seed=seed,
        lengths=Lognormal.of(250, sigma, seed=seed), model=shape("Qwen2.5-3B"),
    )  # fmt: skip
    outcome = simulate(scenario, ADAPTIVE, goal=goal)
    assert most_gpus(outcome, scenario) <= gpus
    for step in outcome.plans:
        assert sorted(len(lengths) for lengths in step.report.lengths.values()) == [4] * 12
    assert max(outcome.step_s) < 900  # a call that nobody takes is lost after that


def test_a_scenario_file_says_how_many_gpus_a_tail_has(tmp_path: Path) -> None:
    lines = [
        'device = "L40S"', 'model = "Qwen2.5-3B"', "gpus = 8", "prompts_per_step = 4", "samples_per_prompt = 2",
        "max_response_length = 100", "lengths = { mean = 50.0, sigma = 0.5 }", "generate_gpus = 2",
    ]  # fmt: skip
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([*lines, "tail_gpus = 4"]))
    scenario = find_scenario(str(path))
    assert scenario.tail_gpus == 4
    assert [s.gpus for s in scenario.specs(ADAPTIVE) if s.name == TAIL] == [4]
    assert [s.name for s in scenario.specs(SERVERFUL) if s.name == TAIL] == []
    for value, message in ((1, "tail_gpus is 1, fewer than the 2 of generate_gpus"), (9, "tail_gpus is 9, more than")):
        path.write_text("\n".join([*lines, f"tail_gpus = {value}"]))
        with pytest.raises(ConfigError, match=message):
            find_scenario(str(path))
