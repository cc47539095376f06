"""StaticPlanner: all samples once, prompts whole, shards balanced by the lengths seen last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.base import CallObservation, FunctionLimits, Prompt, StepObservation, StepRequest
from orchestrator.planner.static import StaticPlanner, balance


def request(prompts: int, n: int, replicas: int) -> StepRequest:
    return StepRequest(
        step=1,
        prompts=[Prompt(group=i, prompt_id=100 + i, tokens=(1, 2, 3)) for i in range(prompts)],
        samples_per_prompt=n,
        max_response_length=64,
        functions={"generate": FunctionLimits(replicas, 1.0), "reward": FunctionLimits(2, 0.1)},
    )


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=40), st.integers(1, 12))
def test_balance_is_a_partition_within_grahams_bound(loads: list[float], bins: int) -> None:
    shards = balance(loads, bins)
    assert sorted(i for shard in shards for i in shard) == list(range(len(loads)))
    assert len(shards) == min(bins, len(loads))
    makespan = max(sum(loads[i] for i in shard) for shard in shards)
    # List scheduling: the bin that ends last was the least loaded when it got its last item.
    assert makespan <= sum(loads) / len(shards) + max(loads) + 1e-6


def test_balance_longest_first_by_hand() -> None:
    # 7, 6 | 5 -> bin 1 (11), 4 -> bin 0 (11), 3 -> bin 0 (count 2 both; first) = {7,4,3}, {6,5}
    assert balance([3, 4, 5, 6, 7], 2) == [[4, 1, 0], [3, 2]]


def test_no_history_counts_differ_by_one_prompt() -> None:
    plan = StaticPlanner().plan(request(prompts=7, n=3, replicas=3))
    assert sorted(len(shard) for shard in plan.shards) == [6, 6, 9]
    assert plan.replicas == {"generate": 3, "reward": 2}
    assert plan.keep == frozenset()
    assert plan.cut_below == 0
    for shard in plan.shards:  # a prompt's samples stand together
        assert all(shard[i : i + 3] == [shard[i] + k for k in range(3)] for i in range(0, len(shard), 3))


def test_lengths_seen_balance_the_next_plan() -> None:
    planner = StaticPlanner(keep_warm=True)
    lengths = {100: [900], 101: [10, 20], 102: [10], 103: [15], 104: []}
    planner.observe(StepObservation(step=1, step_s=2.0, cost_usd=0.1, lengths=lengths, calls=[]))
    plan = planner.plan(request(prompts=4, n=1, replicas=2))
    assert [sorted(s) for s in plan.shards] == [[0], [1, 2, 3]]
    assert plan.keep == {"generate", "reward"}
    assert planner.last_length == {100: 900, 101: 15, 102: 10, 103: 15}


def test_more_replicas_than_prompts_asks_for_no_idle_ones() -> None:
    assert StaticPlanner().plan(request(prompts=1, n=4, replicas=8)).replicas["generate"] == 1


def test_no_prompts_is_a_step_that_only_validates() -> None:
    plan = StaticPlanner().plan(request(prompts=0, n=4, replicas=8))
    assert plan.shards == []
    assert plan.replicas["generate"] == 8


def test_observe_reports_cold_starts() -> None:
    call = CallObservation("generate", "g0", "generate", True, 2.0, 5.0, 10, 10, 1)
    warm = CallObservation("generate", "g0", "generate", False, 0.1, 5.0, 10, 10, 1)
    metrics = StaticPlanner().observe(StepObservation(1, 9.0, 0.5, {}, [call, warm]))
    assert metrics == {"planner/step_s": 9.0, "planner/cost_usd": 0.5, "planner/start_s/generate": 2.0}


@pytest.mark.parametrize(
    ("prompts", "n", "replicas", "message"),
    [(1, 0, 1, "samples_per_prompt is 0"), (1, 1, 0, "generate.max_replicas is 0")],
)
def test_bad_requests_are_refused_in_one_line(prompts: int, n: int, replicas: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticPlanner().plan(request(prompts, n, replicas))
