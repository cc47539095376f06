"""One front for all objectives: whatever is asked, no plan is beaten on both axes by another objective's."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import TAIL, FunctionLimits, PastStep, Prompt, StepRequest
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import Goal

N = 2


@st.composite
def cases(draw: st.DrawFn) -> tuple[StepRequest, PastStep, Priors, int | None]:
    """Prompts of any length, tails of any weight, starts from none to long, in a pool or not."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    count, sigma = draw(st.integers(2, 12)), draw(st.floats(0.1, 1.6))
    prompts = [Prompt(i, i, tuple(range(10 * i, 10 * i + int(rng.integers(5, 3000))))) for i in range(count)]
    lengths = [np.clip(rng.lognormal(5.0, sigma, N), 1, 4000).astype(int).tolist() for _ in prompts]
    pool = draw(st.sampled_from([None, 6, 12]))
    limits = {
        "generate": FunctionLimits(6, 3.0, 1, max_batch=draw(st.sampled_from([2, 64]))),
        "reference": FunctionLimits(4, 3.0, 1),
        "train": FunctionLimits(6, 3.0, 1, min_replicas=1),
    }
    start_s = draw(st.sampled_from([0.0, 2.0, 25.0]))
    generate = GenerateCost(0.1, 1e-4, 0.02, 1e-4, 1e-8)
    work = {
        "reference": WorkCost(0.1, 0.0, 2e-4),
        "train": WorkCost(0.1, 0.0, 8e-4, draw(st.sampled_from([0.0, 30.0]))),
    }
    tail = None
    if draw(st.booleans()):
        limits[TAIL] = FunctionLimits(2, 12.0, 4)
        tail = GenerateCost(0.1, 3e-5, 0.008, 5e-5, 3e-9)
    asked = StepRequest(2, prompts, N, 4096, limits, frozenset({"train"} if draw(st.booleans()) else ()))
    past = PastStep(1, prompts, lengths, [], frozenset(), 1.0)
    return asked, past, Priors(generate, work, dict.fromkeys(limits, start_s), tail), pool


def planned(goal: Goal, asked: StepRequest, past: PastStep, priors: Priors, pool: int | None) -> tuple[float, float]:
    planner = AdaptivePlanner(ADAPTIVE, goal=goal, priors=priors, pool_gpus=pool)
    for _ in range(2):
        planner.recall(past, asked.max_response_length)
    plan = planner.plan(asked)
    (point,) = [p for p in plan.curve if p.replicas == plan.chosen]
    return point.time_s, point.cost_usd


@settings(max_examples=40, deadline=None)
@given(cases(), st.floats(1.0, 3.0))
def test_no_objective_s_plan_is_worse_on_both_axes_than_another_s(
    case: tuple[StepRequest, PastStep, Priors, int | None], slack: float
) -> None:
    found = {goal: planned(goal, *case) for goal in (Goal("speed"), Goal("knee"), Goal("cost"))}
    # With a margin for the slower steps: 1.15 of the prediction is what has to be in time.
    late = Goal("cost", deadline_s=1.15 * slack * found[Goal("speed")][0])
    found[late] = planned(late, *case)
    assert found[late][0] <= (late.deadline_s or 0.0)
    for (_, one), (_, other) in itertools.permutations(found.items(), 2):
        assert not (other[0] < one[0] * (1 - 1e-9) and other[1] < one[1] * (1 - 1e-9))
    assert min(found.values()) == found[Goal("speed")]
    assert min(cost for _, cost in found.values()) == found[Goal("cost")][1]
