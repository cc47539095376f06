"""What is asked for is had: the cheapest plan in time costs no more than the knee, on RLHFless's test-bed."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import Goal
from orchestrator.simulation import scenarios
from orchestrator.simulation.baselines import RLHFLESS
from orchestrator.simulation.job import simulate


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen2.5-3B"])
@pytest.mark.parametrize("data", scenarios.DATA)
def test_cost_is_in_time_and_no_dearer_than_the_knee(model: str, data: str) -> None:
    """With RLHFless's mean step as deadline, which both meet; its steps cost more, too."""
    scenario = scenarios.rlhfless_testbed(model, "grpo", data)
    rlhfless = simulate(scenario, RLHFLESS)
    deadline_s = float(np.mean(rlhfless.step_s))
    knee = simulate(scenario, ADAPTIVE, goal=Goal("knee"))
    cost = simulate(scenario, ADAPTIVE, goal=Goal("cost", deadline_s=deadline_s))
    assert np.mean(cost.step_s) <= deadline_s
    assert cost.total_gpu_s <= min(knee.total_gpu_s, rlhfless.total_gpu_s)
