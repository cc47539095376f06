"""AdaptivePlanner: nothing known is the static plan; what was observed is decided by; bad requests are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import (
    CallObservation,
    FunctionLimits,
    PastStep,
    Prompt,
    StepObservation,
    StepPlan,
    StepRequest,
)  # fmt: skip
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import Goal, Unmet
from orchestrator.planner.static import StaticPlanner


def request(kv_tokens: int | None = None) -> StepRequest:
    functions = {
        "generate": FunctionLimits(8, 3.6, 1, max_batch=64, kv_tokens=kv_tokens),
        "reward": FunctionLimits(2, 0.36),
        "train": FunctionLimits(1, 14.4, 4),
    }
    return StepRequest(1, [Prompt(i, i, tuple(range(20 + i))) for i in range(12)], 4, 512, functions)


def seen(plan: StepPlan) -> StepObservation:
    """Prompts 0..2 are long; a decode step takes 10 ms and 0.1 ms a sequence. 0.2 s of the step no call is open."""
    lengths = {i: [400 if i < 3 else 20] * 4 for i in range(12)}
    calls = []
    for shard in plan.shards:
        each = [lengths[s // 4][s % 4] for s in shard]
        stats = {
            "prefill_tokens": 100.0, "prefill_s": 0.01, "decode_tokens": float(sum(each)),
            "decode_steps": float(max(each)), "decode_s": 0.01 * max(each) + 1e-4 * sum(each),
        }  # fmt: skip
        work_s = 0.01 + stats["decode_s"]
        calls.append(
            CallObservation(
                "generate", "g", "generate", False, 0.0, work_s, 400, sum(each), len(each), work_s, stats=stats
            )
        )
    end_s = max(call.stop_s for call in calls)
    counts = {"samples": 48.0, "tokens": 48 * 25.5 + sum(map(sum, lengths.values()))}
    for name in ("reward", "train"):
        end_s += 0.6
        calls.append(CallObservation(name, name, "work", False, 0.0, 0.5, 0, 0, 0, end_s, counts))
    return StepObservation(1, end_s, 0.1, lengths, calls)


def test_without_history_or_prior_the_plan_is_the_static_one() -> None:
    plan = AdaptivePlanner(ADAPTIVE).plan(request())
    assert plan == StaticPlanner().plan(request())


def test_before_anything_is_known_the_cheapest_has_nothing_wait_beside_generation() -> None:
    plan = AdaptivePlanner(ADAPTIVE, goal=Goal("cost")).plan(request())
    assert plan == replace(StaticPlanner().plan(request()), overlap=False)
    assert AdaptivePlanner(ADAPTIVE, goal=Goal("cost", deadline_s=60.0)).plan(request()).overlap


def test_the_cheapest_starts_nothing_ahead_of_samples_that_may_be_late() -> None:
    """Where it costs the same if all goes as predicted, and less where it does not; the fastest starts ahead."""
    costs = {name: WorkCost(0.1, 0.01, 0.0) for name in ("reward", "train")}
    priors = Priors(GenerateCost(0.1, 0.0, 0.01, 0.0, 0.0), costs, {"generate": 2.0, "reward": 2.0, "train": 2.0})
    cheap, fast = (
        AdaptivePlanner(ADAPTIVE, goal=goal, priors=priors).plan(request()) for goal in (Goal("cost"), Goal("speed"))
    )
    assert not cheap.prewarm_s
    assert "reward" in fast.prewarm_s


def test_what_was_observed_groups_the_long_prompts_and_predicts_the_step() -> None:
    planner = AdaptivePlanner(ADAPTIVE, goal=Goal("cost"))
    planner.observe(seen(planner.plan(request())))
    plan = planner.plan(request())
    assert sorted(s for shard in plan.shards for s in shard) == list(range(48))
    assert plan.predicted_step_s is not None
    longest_s = 0.01 + 4.0 + 1e-4 * (12 * 400 + (len(plan.shards[0]) - 12) * 20)
    assert plan.predicted_step_s == pytest.approx(longest_s + 0.5 + 0.5 + 0.2, rel=0.1)
    assert {int(p.replicas) for p in plan.curve} >= {1}
    first = next(shard for shard in plan.shards if 0 in shard)
    assert {0, 4, 8} <= {s - s % 4 for s in first}  # the three long prompts stand together


def test_the_plan_is_a_function_of_request_and_observations() -> None:
    plans = []
    for _ in range(2):
        planner = AdaptivePlanner(ADAPTIVE)
        planner.observe(seen(planner.plan(request())))
        plans.append(planner.plan(request()))
    assert plans[0] == plans[1]


def test_a_deadline_in_reach_is_met_at_the_least_cost() -> None:
    cost = GenerateCost(0.0, 0.0, 0.01, 0.01, 0.0)
    cheap, fast = (
        AdaptivePlanner(ADAPTIVE, goal=goal, priors=Priors(cost)).plan(request())
        for goal in (Goal("cost"), Goal("speed"))
    )
    assert cheap.predicted_step_s is not None
    assert fast.predicted_step_s is not None
    assert fast.predicted_step_s < cheap.predicted_step_s
    assert fast.replicas["generate"] > cheap.replicas["generate"]


def test_a_deadline_is_met_with_a_margin_for_how_far_steps_went_beyond_their_predictions() -> None:
    """Planned again and again for 20 s while steps take 1.25 of what is predicted: soon for no more than 20 / 1.25."""
    cost = GenerateCost(0.0, 0.0, 0.01, 0.01, 0.0)
    planner = AdaptivePlanner(ADAPTIVE, goal=Goal("cost", deadline_s=20.0), priors=Priors(cost))
    predicted = []
    for _ in range(5):
        plan = planner.plan(request())
        assert plan.predicted_step_s is not None
        predicted.append(plan.predicted_step_s)
        lengths = {i: [200] * 4 for i in range(12)}
        step_s = 1.25 * plan.predicted_step_s
        call = CallObservation("reward", "r", "work", False, 0.0, step_s, 0, 0, 0, step_s)  # of which nothing is told
        planner.observe(StepObservation(1, step_s, 0.1, lengths, [call]))
    assert max(predicted[2:]) <= 20.0 / 1.25
    free = AdaptivePlanner(ADAPTIVE, goal=Goal("cost"), priors=Priors(cost))
    free.observe(StepObservation(1, step_s, 0.1, lengths, [call]))
    alone = free.plan(request())
    assert alone.predicted_step_s is not None
    assert alone.predicted_step_s > 20.0
    assert (plan.predicted_cost_usd or 0.0) >= (alone.predicted_cost_usd or 0.0)


def test_a_deadline_that_no_step_would_meet_if_it_went_as_well_as_they_do_stops_the_job() -> None:
    """One that predictions miss by a tenth is tried with the fastest plan."""
    cost = GenerateCost(0.0, 0.0, 0.01, 0.01, 0.0)

    def planned(goal: Goal) -> StepPlan:
        planner = AdaptivePlanner(ADAPTIVE, goal=goal, priors=Priors(cost))
        planner.observe(StepObservation(1, 1.0, 0.1, {i: [200] * 4 for i in range(12)}, []))
        return planner.plan(request())

    fastest = planned(Goal("speed"))
    assert fastest.predicted_step_s is not None
    late = planned(Goal("cost", deadline_s=0.9 * fastest.predicted_step_s))
    assert late.predicted_step_s == fastest.predicted_step_s
    with pytest.raises(Unmet, match="too late"):
        planned(Goal("cost", deadline_s=0.8 * fastest.predicted_step_s))


def test_lengths_beyond_the_capacity_are_refused() -> None:
    planner = AdaptivePlanner(ADAPTIVE, priors=Priors(GenerateCost(0.0, 0.0, 0.01, 0.0, 0.0)))
    with pytest.raises(ValueError, match="does not fit the KV capacity of 100 tokens"):
        planner.plan(request(kv_tokens=100))


@pytest.mark.parametrize(("prefill_token_s", "alone"), [(1e-3, True), (0.0, False)])
def test_prompts_of_one_system_prompt_stay_together_while_that_is_worth_it(prefill_token_s: float, alone: bool) -> None:
    """Two system prompts of 1,000 tokens, four prompts of each; of both, one prompt in four is four times as long."""
    heads = [tuple(range(1000 * k, 1000 * (k + 1))) for k in (1, 2)]
    prompts = [Prompt(i, i, (*heads[i % 2], 9000 + i)) for i in range(8)]
    asked = StepRequest(1, prompts, 4, 512, {"generate": FunctionLimits(2, 3.6, 1)})
    cost = GenerateCost(0.0, prefill_token_s, 0.01, 1e-4, 0.0)
    planner = AdaptivePlanner(ADAPTIVE, goal=Goal("speed"), priors=Priors(cost))
    lengths = {i: [400 if i < 3 else 100] * 4 for i in range(8)}
    planner.recall(PastStep(0, prompts, list(lengths.values()), [], frozenset(), 1.0), 512)
    plan = planner.plan(asked)
    assert len(plan.shards) == 2
    families = [{prompts[s // 4].tokens[0] for s in shard} for shard in plan.shards]
    assert all(len(found) == 1 for found in families) == alone
