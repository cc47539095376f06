"""A tail that goes on with replicas of more GPUs: cases by hand, and plans against counting every step."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import TAIL, FunctionLimits, PastStep, Prompt, StepPlan, StepRequest
from orchestrator.planner.latency import GenerateCost
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import Goal
from orchestrator.planner.tail import ShardState, Tail, TailFunction

STEPS = GenerateCost(0.0, 0.0, 1.0, 0.0, 0.0)
FASTER = GenerateCost(3.0, 0.0, 0.25, 0.0, 0.0)


def tail(shards: list[list[float]], function: TailFunction) -> Tail:
    states = [ShardState.of(np.zeros(len(s)), np.array(s), STEPS, 64, 0.0) for s in shards]
    return Tail(states, STEPS, max_batch=64, kv_tokens=None, function=function)


def test_a_tail_function_by_hand() -> None:
    """At 10 s two samples are left, with 90 and 70 steps to go. Its replica is asked for at 6, up at 10, loads for
    3 s and ends at 13 + 90 / 4; both narrow ones are gone at 10."""
    end = tail([[10, 10, 100], [10, 10, 80]], TailFunction(FASTER, 64, None, 4.0, 2, 2, 1, 4))
    one, two = (c for c in end.to_function((0.34,)) if c.cut_below == 2)
    assert (one.function, one.migrate_to, one.open_s, one.begin_s, one.time_s) == (TAIL, 1, 6.0, 10.0, 35.5)
    assert (one.replica_s, one.tail_s) == (20.0, 29.5)
    np.testing.assert_allclose(end.finish(one)[0], [10, 10, 10, 10, 30.5, 35.5])
    # Of two, the second finds its GPUs when the narrow ones are gone: both are asked for then.
    assert (two.open_s, two.begin_s, two.ends_s) == (10.0, 14.0, (39.5, 34.5))


def test_a_pool_that_is_full_makes_the_tail_wait_for_shards_that_end() -> None:
    function = TailFunction(FASTER, 64, None, 4.0, 2, 2, 1, 3)
    assert function.room_at_s(1, np.array([8.0, 10.0])) == 8.0
    (choice,) = tail([[5, 8], [10, 80]], function).to_function((0.25,))[:1]
    assert (choice.cut_below, choice.open_s, choice.begin_s) == (1, 8.0, 12.0)
    assert TailFunction(FASTER, 64, None, 4.0, 2, 2, 1, None).room_at_s(2, np.array([8.0])) == 0.0


def planned(function: GenerateCost, goal: Goal, lengths: list[int], gpus: int = 4) -> StepPlan:
    """Eight prompts of one sample each, whose lengths never change; eight narrow GPUs."""
    prompts = [Prompt(i, i, (i, 7, 7)) for i in range(len(lengths))]
    functions = {
        "generate": FunctionLimits(4, 1.0, 1),
        TAIL: FunctionLimits(2, float(gpus), gpus),
    }
    narrow = GenerateCost(0.5, 0.01, 0.1, 0.001, 0.0)
    priors = Priors(narrow, start_s={"generate": 2.0, TAIL: 2.0}, tail=function)
    planner = AdaptivePlanner(ADAPTIVE, goal=goal, priors=priors, pool_gpus=8)
    planner.recall(PastStep(0, prompts, [[n] for n in lengths], [], frozenset(), 1.0), 400)
    return planner.plan(StepRequest(1, prompts, 1, 400, functions))


def counted(plan: StepPlan, cost: GenerateCost, lengths: list[int]) -> float:
    """When the last sample is done, by taking every step of every replica one after the other; starts at 2 s."""
    begin_s, left, ended = 2.0 + 0.5, [], list[tuple[float, int]]()
    for shard in plan.shards:
        now_s, step = begin_s + 0.01 * 3 * len(shard), 0
        while active := [s for s in shard if lengths[s] > step]:
            now_s, step = now_s + 0.1 + 0.001 * len(active), step + 1
            left += [(now_s, s, step) for s in active]
            ended += [(now_s, s) for s in active if lengths[s] == step]
    ended.sort()
    if plan.tail != TAIL:
        return ended[-1][0]
    cut_s = ended[-plan.cut_below - 1][0]
    held = {s: max(k for t, other, k in left if other == s and t <= cut_s + 1e-9) for t, s in ended[-plan.cut_below :]}
    more = sorted(((lengths[s] - k, 3 + k) for s, k in held.items()), reverse=True)
    ends = []
    for k in range(plan.migrate_to):
        own = more[k :: plan.migrate_to]
        steps = sum(cost.step_s + cost.sequence_s * sum(n >= t for n, _ in own) for t in range(1, own[0][0] + 1))
        ends.append(cut_s + cost.call_s + cost.prefill_token_s * sum(h for _, h in own) + steps)
    return max(ends)


LENGTHS = [20, 25, 30, 35, 40, 45, 300, 360]


@pytest.mark.parametrize(
    ("step_s", "call_s", "pays"), [(0.03, 1.0, True), (0.06, 3.0, True), (0.08, 9.0, False), (0.1, 0.0, False)]
)
def test_the_tail_goes_where_the_last_sample_is_done_first(step_s: float, call_s: float, pays: bool) -> None:
    """From 45 tokens on the longest has 315 steps to go: 31.5 s here, `call_s` and 315 steps there."""
    function = GenerateCost(call_s, 0.002, step_s, 0.0005, 0.0)
    plan = planned(function, Goal("speed"), LENGTHS)
    assert (plan.tail == TAIL) == pays
    assert plan.generated_s == pytest.approx(counted(plan, function, LENGTHS), rel=0.02)
    if pays:
        assert plan.replicas[TAIL] == plan.migrate_to >= 1
        assert plan.prewarm_s[TAIL] == pytest.approx(next(s.start_s for s in plan.stages if s.function == TAIL) - 2.0)
        uncut_s = 2.0 + 0.5 + 0.03 + 0.101 * 360
        assert counted(plan, function, LENGTHS) < uncut_s


@pytest.mark.parametrize(("step_s", "pays"), [(0.01, True), (0.05, False)])
def test_for_cost_four_gpus_have_to_be_four_times_as_fast(step_s: float, pays: bool) -> None:
    plan = planned(GenerateCost(0.1, 0.0, step_s, 0.0, 0.0), Goal("cost"), LENGTHS)
    assert (plan.tail == TAIL) == pays
    assert plan.predicted_cost_usd is not None
    if not pays:  # one narrow replica that takes every step: 2 s of start, 0.5 s of call, prefill, decode
        assert plan.predicted_cost_usd * 3600 == pytest.approx(2.5 + 0.24 + 36.0 + 0.001 * sum(LENGTHS), rel=0.01)


def test_where_the_pool_has_no_room_for_it_the_tail_stays() -> None:
    lengths, function = LENGTHS, GenerateCost(0.1, 0.0, 0.001, 0.0, 0.0)
    plan = planned(function, Goal("speed"), lengths, gpus=16)  # does not fit the pool
    assert (plan.tail, plan.replicas[TAIL]) == ("generate", 0)
