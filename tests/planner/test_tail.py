"""Cutting the tail: a case by hand, conservation of work, and stages beside generation by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.latency import GenerateCost
from orchestrator.planner.tail import ShardState, Tail, remaining_instances

STEPS = GenerateCost(0.0, 0.0, 1.0, 0.0, 0.0)


def tail(shards: list[list[float]], cost: GenerateCost = STEPS, prompt: float = 0.0, max_batch: int = 64) -> Tail:
    states = [
        ShardState.of(np.full(len(s), prompt), np.array(s, dtype=float), cost, max_batch, prompt * len(s))
        for s in shards
    ]
    return Tail(states, cost, max_batch=max_batch, kv_tokens=None)


def test_a_cut_by_hand() -> None:
    end = tail([[10, 10, 100], [10, 10, 80]])
    assert (end.uncut.time_s, end.uncut.replica_s) == (100, 180)
    choice = end.at(2)  # at 10 s two are left, with 90 and 70 steps to go: on one replica they end at 100 s
    assert (choice.migrate_to, choice.time_s, choice.replica_s) == (1, 100, 110)
    np.testing.assert_allclose(end.finish(choice)[0], [10, 10, 10, 10, 80, 100])


def test_moving_costs_the_prefill_of_what_is_held() -> None:
    cost = GenerateCost(call_s=2.0, prefill_token_s=0.01, step_s=1.0, sequence_s=0.0, kv_token_s=0.0)
    end = tail([[10, 100], [10, 80]], cost, prompt=50)
    # prefill 2 x 50 tokens: 1 s, call 2 s: first finishes at 13; 60 tokens held by each, then 90 steps to go.
    choice = end.at(2)
    assert choice.time_s == pytest.approx(13 + 2 + 0.01 * 120 + 90)
    assert choice.replica_s == pytest.approx(13 + 13 + 2 + 1.2 + 90)


def test_moving_costs_writing_and_reading_what_is_held() -> None:
    cost = GenerateCost(2.0, 0.01, 1.0, 0.0, 0.0, moved_token_s=0.001)
    end = tail([[10, 100], [10, 80]], cost, prompt=50)
    # As above, but both write their 60 tokens in 0.06 s, side by side, and 120 are taken up in 0.12 s.
    choice = end.at(2)
    assert choice.time_s == pytest.approx(13 + 0.06 + 2 + 0.12 + 90)
    assert choice.replica_s == pytest.approx(13.06 + 13.06 + 2 + 0.12 + 90)
    np.testing.assert_allclose(end.finish(choice)[0], [13, 13, 13.06 + 2.12 + 70, 13.06 + 2.12 + 90])


def test_no_cut_where_it_frees_no_replica_or_nothing_is_left() -> None:
    assert tail([[10, 100]]).at(1).cut_below == 0
    assert tail([[10, 10], [10, 10]]).at(1).cut_below == 0
    assert tail([[10, 100], [10, 80]]).at(0).cut_below == 0
    assert tail([[10, 100], [10, 80]]).at(99).cut_below == 0


def test_remaining_instances_is_rlhfuses_m() -> None:
    assert remaining_instances(100, 0.0, 64, None) == 2
    assert remaining_instances(10, 5000.0, 64, 1000) == 5
    assert remaining_instances(0, 0.0, 64, 1000) == 0


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=12), min_size=2, max_size=5), st.integers(1, 20))
def test_every_sample_finishes_and_none_before_its_own_steps(lengths: list[list[int]], below: int) -> None:
    end = tail([[float(v) for v in shard] for shard in lengths])
    choice = end.at(below)
    finish = end.finish(choice)[0]
    expected = np.sort(np.concatenate([np.array(shard, dtype=float) for shard in lengths]))
    # With steps that cost the same whatever is in them, a cut changes nobody's finish.
    np.testing.assert_allclose(finish, expected)
    assert choice.replica_s <= end.uncut.replica_s + choice.time_s * choice.migrate_to + 1e-9


def test_best_cut_never_loses_against_none() -> None:
    rng = np.random.default_rng(0)
    cost = GenerateCost(0.1, 1e-4, 0.01, 2e-4, 1e-8)
    end = tail([np.exp(rng.normal(5, 0.9, 32)).tolist() for _ in range(8)], cost, prompt=100)
    by_cost = min(end.moved(), key=lambda c: (c.replica_s, c.time_s))
    assert by_cost.replica_s < 0.8 * end.uncut.replica_s
    by_time = min(end.moved(), key=lambda c: (c.time_s, c.replica_s))
    assert by_time.time_s <= end.uncut.time_s


def test_capped_samples_that_end_together_are_moved_or_stay_once() -> None:
    """Equal lengths at the cap, more samples than slots, prompts that differ: times equal up to rounding."""
    rng, cost = np.random.default_rng(0), GenerateCost(0.1, 4e-5, 0.025, 0.0, 1.4e-7)
    for _ in range(40):
        lengths = np.minimum(rng.lognormal(6.3, 0.8, (2, 300)), 2048.0)
        prompts = rng.integers(200, 300, (2, 300)).astype(float)
        states = [
            ShardState.of(p, n, cost, 256, 3e4, np.arange(300) + 300 * k)
            for k, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        end = Tail(states, cost, max_batch=256, kv_tokens=None)
        for below in (10, 60, 120):
            left = end.leftover(below)
            if left is not None:
                _, numbers = end.finish(end.move(below, left, 1))
                assert sorted(numbers.tolist()) == list(range(600))
