"""The real loop and planner in virtual time: every policy trains the same; predictions close in on what happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.planner.devices import device, shape
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import Goal
from orchestrator.simulation.baselines import POLICIES
from orchestrator.simulation.job import Outcome, simulate
from orchestrator.simulation.lengths import LengthTrace, Lognormal
from orchestrator.simulation.scenario import Scenario

SMALL = Scenario(
    "small", device("L40S"), shape("Qwen2.5-3B"), 8, "grpo", Lognormal.of(150, 0.8), prompts_per_step=12,
    samples_per_prompt=4, max_response_length=600, train_gpus=4, epoch_steps=2, steps=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {name: simulate(SMALL, POLICIES[name], deterministic=True) for name in ("serverful", "rlhfless", "adaptive")}


def test_every_policy_commits_the_same_history(outcomes: dict[str, Outcome]) -> None:
    histories = [o.history for o in outcomes.values()]
    assert len(histories[0]) == 8
    assert len({str(h["weights"]) for h in histories[0]}) == 8
    assert histories[0] == histories[1] == histories[2]


def test_a_simulation_repeats_itself_exactly() -> None:
    first, again = (simulate(SMALL, ADAPTIVE) for _ in range(2))
    assert first.step_s == again.step_s
    assert first.total_gpu_s == again.total_gpu_s


def test_a_held_pool_is_paid_for_the_whole_time_and_functions_only_while_they_exist(
    outcomes: dict[str, Outcome],
) -> None:
    held, rlhfless, adaptive = outcomes.values()
    assert held.total_gpu_s == pytest.approx(8 * sum(held.step_s))
    assert adaptive.total_gpu_s < 0.9 * held.total_gpu_s
    paid = sum(
        {"generate": 1, "reference": 1, "train": 1}.get(u.function, 0) * ((u.stopped_s or 0.0) - u.started_s)
        for u in rlhfless.usage
    )
    assert rlhfless.total_gpu_s == pytest.approx(paid)


def test_predicted_step_time_is_within_15_percent_after_five_steps() -> None:
    outcome = simulate(replace(SMALL, steps=14), ADAPTIVE)
    errors = [m["planner/error/step"] for m in outcome.metrics[5:]]
    assert np.median(errors) < 0.15
    assert outcome.metrics[-1]["planner/length_r"] > 0.5


@pytest.mark.parametrize("name", ["rlhfuse", "adaptive"])
def test_every_sample_is_generated_once_with_cuts_and_a_critic(name: str) -> None:
    scenario = replace(SMALL, recipe="ppo", train_gpus=2, steps=4)
    outcome = simulate(scenario, POLICIES[name], goal=Goal("speed"))
    for result in outcome.plans:
        lengths = result.report.lengths
        assert sorted(lengths) == list(range(12))
        assert all(len(values) == 4 for values in lengths.values())


def test_a_trace_fixes_the_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        f'{{"step": {s}, "group": {g}, "index": {i}, "length": {10 + s + g + i}}}'
        for s in (1, 2)
        for g in range(12)
        for i in range(4)
    ]
    path.write_text("\n".join(lines))
    outcome = simulate(replace(SMALL, steps=2, lengths=LengthTrace.read(path)), ADAPTIVE)
    assert outcome.plans[1].report.lengths == {g: [12 + g + i for i in range(4)] for g in range(12)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "group": 0, "length": 3}', r"trace.jsonl:1: lacks index"),
        ("nonsense", r"trace.jsonl:1: not JSON"),
        ('{"step": 1, "group": 0, "index": 0, "length": 0}', r"trace.jsonl:1: length is 0"),
        ("", r"trace.jsonl: an empty trace"),
    ],
)
def test_bad_traces_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        LengthTrace.read(path)


def test_one_prompt_one_sample() -> None:
    outcome = simulate(replace(SMALL, prompts_per_step=1, samples_per_prompt=1, steps=3), ADAPTIVE)
    assert len(outcome.step_s) == 3


def test_a_deadline_that_cannot_be_met_stops_the_job_and_says_what_would() -> None:
    with pytest.raises(BaseException, match=r"deadline of 0\.5 s cannot be met"):
        simulate(SMALL, ADAPTIVE, goal=Goal("cost", deadline_s=0.5))


def test_a_slow_link_makes_functions_take_turns_and_learning_is_the_same() -> None:
    """At 0.1 GB/s the state of a 3B model takes minutes: the pool is held from the step on that knows, which is then as
    fast as a reserved one; set-up is outside the steps' books."""
    slow = replace(SMALL, link_gb_s=0.1, process_s=25.0, steps=4)
    policies = (POLICIES[name] for name in ("serverful", "adaptive"))
    held, adaptive = (simulate(slow, policy, goal=Goal("speed"), deterministic=True) for policy in policies)
    assert all(step.plan.turns == slow.gpus for step in adaptive.plans)
    assert adaptive.history == held.history
    assert np.mean(adaptive.step_s[1:]) <= 1.02 * np.mean(held.step_s[1:])
    parked = simulate(replace(slow, back_s=1.4, leave_s=1.0, node_gb_s=12.0), POLICIES["adaptive"], goal=Goal("cost"))
    assert (parked.setup_s > 25.0, parked.setup_gpu_s > 0.0, held.setup_gpu_s) == (True, True, 0.0)
    assert parked.total_gpu_s < 0.8 * held.total_gpu_s
