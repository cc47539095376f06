"""Holding all GPUs and taking turns on them is one point of the search: no policy is ever better under the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import (
    CallObservation,
    CurvePoint,
    FunctionLimits,
    PastStep,
    Prompt,
    StepObservation,
    StepPlan,
    StepRequest,
)
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import ADAPTIVE, Policy
from orchestrator.planner.scaling import OBJECTIVES, Goal, Objective
from orchestrator.simulation.baselines import RLHFUSE, SERVERFUL
from tests.planner.test_front import cases


def turns(priors: Priors) -> Priors:
    """Nothing starts, and no state is read or written."""
    work = {name: replace(cost, shared_s=0.0) for name, cost in priors.work.items()}
    return Priors(priors.generate, work, dict.fromkeys(priors.start_s, 0.0))


def planned(
    policy: Policy, goal: Goal, asked: StepRequest, past: PastStep, priors: Priors, held: Priors | None = None
) -> tuple[StepPlan, CurvePoint]:
    planner = AdaptivePlanner(policy, goal=goal, priors=priors, pool_gpus=12, turns=held)
    for _ in range(2):
        planner.recall(past, asked.max_response_length)
    plan = planner.plan(asked)
    (point,) = [p for p in plan.curve if p.replicas == plan.chosen]
    return plan, point


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(OBJECTIVES))
def test_never_worse_than_a_held_pool_with_or_without_fusion_or_than_scaling_to_zero(
    case: tuple[StepRequest, PastStep, Priors, int | None], objective: Objective
) -> None:
    asked, past, priors, _ = case
    goal, held = Goal(objective), turns(priors)
    plan, point = planned(ADAPTIVE, goal, asked, past, priors, held)
    others = [
        planned(SERVERFUL, goal, asked, past, held)[1],
        planned(RLHFUSE, goal, asked, past, held)[1],
        planned(ADAPTIVE, goal, asked, past, priors)[1],
    ]
    best = min(goal.rank(other.time_s, other.cost_usd)[0] for other in others)
    assert goal.rank(point.time_s, point.cost_usd)[0] <= best * (1 + 1e-9)
    assert bool(plan.turns) == bool(plan.keep)


def test_turns_are_taken_where_starts_take_long_and_not_where_they_take_nothing() -> None:
    """One replica's work of 12 s in all: with starts of a minute, the pool is held; without any it is let go."""
    prompts = [Prompt(i, i, (i,)) for i in range(12)]
    limits = {"generate": FunctionLimits(12, 1.0, 1), "train": FunctionLimits(12, 1.0, 1, min_replicas=1)}
    asked = StepRequest(1, prompts, 1, 100, limits)
    past = PastStep(0, prompts, [[100]] * 12, [], frozenset(), 1.0)
    work = {"train": WorkCost(0.0, 0.0, 0.005)}
    for start_s, in_turns in ((60.0, True), (0.0, False)):
        priors = Priors(GenerateCost(0.0, 0.0, 0.1, 0.0, 0.0), work, dict.fromkeys(limits, start_s))
        plan, _ = planned(ADAPTIVE, Goal("cost"), asked, past, priors, turns(priors))
        assert bool(plan.turns) == in_turns
    # 10 s of generation on however many replicas, and 6 GPU-seconds of training
    scored = {"train": WorkCost(0.0, 0.5, 0.0)}
    priors = Priors(GenerateCost(0.0, 0.0, 0.1, 0.0, 0.0), scored, dict.fromkeys(limits, 60.0))
    for goal, held in ((Goal("speed"), 12), (Goal("cost"), 6)):
        plan, point = planned(ADAPTIVE, goal, asked, past, priors, turns(priors))
        assert (plan.turns, plan.replicas["generate"], plan.replicas["train"]) == (held, held, held)
        assert (point.time_s, point.gpu_s) == pytest.approx((10 + 6 / held, held * (10 + 6 / held)))


def test_what_a_recipe_asks_of_a_function_is_known_without_turns_when_it_was_seen_in_turns() -> None:
    """The reference function says what the actor thinks, too: 24 samples of a step's 12."""
    prompts = [Prompt(i, i, (i,)) for i in range(12)]
    limits = {name: FunctionLimits(12, 1.0, 1) for name in ("generate", "reference")}
    asked = StepRequest(1, prompts, 1, 100, limits)
    each = {"reference": WorkCost(0.0, 1.0, 0.0)}
    priors = Priors(GenerateCost(0.0, 0.0, 0.1, 0.0, 0.0), each, dict.fromkeys(limits, 60.0))
    planner = AdaptivePlanner(ADAPTIVE, goal=Goal("speed"), priors=priors, pool_gpus=12, turns=turns(priors))
    assert planner.plan(asked).turns == 12
    stats = {"samples": 12.0, "tokens": 1200.0}
    call = CallObservation("reference", "r", "logprobs", False, 0.0, 12.0, 0, 1200, 12, 12.0, stats)
    planner.observe(StepObservation(1, 24.0, 0.1, {i: [100] for i in range(12)}, [call, replace(call, stop_s=24.0)]))
    assert planner.learned.passes == {"reference": 2}
    plan = planner.plan(replace(asked, step=2))
    ((begin_s, end_s),) = [(s.start_s, s.stop_s) for s in plan.stages if s.function == "reference"]
    assert end_s - begin_s >= 2.0  # 24 samples of a second each on 12 replicas


@pytest.mark.parametrize("policy", [SERVERFUL, RLHFUSE])
def test_stages_in_turns_wait_for_the_gpus_of_generation_and_for_each_other(policy: Policy) -> None:
    """All samples end at 10 s, when the first GPU is free: two stages of 6 GPU-seconds and training of 12 follow.
    Scores need no GPU."""
    prompts = [Prompt(i, i, (i,)) for i in range(12)]
    limits = {name: FunctionLimits(12, 1.0, 1) for name in ("generate", "reference", "critic", "train")}
    limits["reward"] = FunctionLimits(12, 0.0, 0)
    asked = StepRequest(1, prompts, 1, 100, limits)
    past = PastStep(0, prompts, [[100]] * 12, [], frozenset(), 1.0)
    each = WorkCost(0.0, 0.5, 0.0)
    work = {"reference": each, "critic": each, "reward": each, "train": WorkCost(0.0, 1.0, 0.0)}
    priors = Priors(GenerateCost(0.0, 0.0, 0.1, 0.0, 0.0), work, dict.fromkeys(limits, 0.0))
    plan, _ = planned(policy, Goal("speed"), asked, past, priors)
    stages = {stage.function: stage for stage in plan.stages}
    assert stages["reference"].start_s == pytest.approx(10.0)
    assert (stages["train"].start_s, stages["train"].stop_s) == pytest.approx((10.0 + 0.5 + 0.5, 12.0))
