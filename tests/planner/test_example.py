"""The example at the head of orchestrator/planner/__init__.py, number by number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import GENERATE, FunctionLimits, PastStep, Prompt, StepRequest
from orchestrator.planner.latency import GenerateCost
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import ADAPTIVE, Policy
from orchestrator.planner.static import StaticPlanner

PROMPTS = [Prompt(0, 0, (1,)), Prompt(1, 1, (2,))]
ASKED = StepRequest(1, PROMPTS, 2, 200, {GENERATE: FunctionLimits(2, 3600.0, max_batch=2)})


def planner(policy: Policy = ADAPTIVE) -> AdaptivePlanner:
    found = AdaptivePlanner(policy, priors=Priors(GenerateCost(0.0, 0.0, 1.0, 0.0, 0.0)))
    for _ in range(2):  # the second tells how far lengths are from what was predicted
        found.recall(PastStep(0, PROMPTS, [[90, 30], [30, 90]], [], frozenset(), 0.0), 200)
    return found


def test_the_lengths_are_those_of_the_example() -> None:
    predicted = planner().lengths.predict(PROMPTS, 200)
    assert predicted.mean.tolist() == pytest.approx([60, 60])
    assert predicted.samples(2, ASKED.step).tolist() == pytest.approx([90, 30, 30, 90])


def test_the_cut_is_chosen() -> None:
    plan = planner().plan(ASKED)
    assert plan.shards == [[0, 1], [2, 3]] == StaticPlanner().plan(ASKED).shards
    assert (plan.cut_below, plan.migrate_to, plan.replicas[GENERATE]) == (2, 1, 2)
    assert [plan.predicted_step_s, plan.predicted_cost_usd] == pytest.approx([90, 120])
    curve = [[p.replicas, p.time_s, p.cost_usd] for p in plan.curve]
    assert np.array(curve) == pytest.approx(np.array([[1, 150, 150], [2, 90, 120]]))


def test_without_a_cut_two_replicas_cost_180() -> None:
    """Not the knee, then: of 150 x 150 and 90 x 180 the second is the least; it costs half as much again."""
    plan = planner(replace(ADAPTIVE, cut="never")).plan(ASKED)
    assert (plan.cut_below, plan.replicas[GENERATE]) == (0, 2)
    assert [plan.predicted_step_s, plan.predicted_cost_usd] == pytest.approx([90, 180])
