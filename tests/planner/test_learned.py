"""What calls teach: rows by what each was given, a gang by its slowest rank, the time in which no call is open."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.base import TAIL, CallObservation
from orchestrator.planner.latency import GenerateCost
from orchestrator.planner.learned import LearnedCosts, Priors, longest_ranks, open_s
from orchestrator.planner.static import StaticPlanner
from tests.planner.test_adaptive import request

NOTHING = np.zeros(0)


def work(
    function: str, stop_s: float, work_s: float, samples: float, tokens: float, *, ranks: int = 1, start_s: float = 0.0,
    waited_s: float = 0.0,
) -> CallObservation:  # fmt: skip
    stats = {"samples": samples, "tokens": tokens, "ranks": float(ranks), "waited_s": waited_s}
    return CallObservation(function, function, "work", start_s > 0, start_s, work_s, 0, 0, 0, stop_s, stats)


def test_calls_of_different_sizes_tell_the_parts_of_their_time() -> None:
    learned, rng = LearnedCosts(), np.random.default_rng(0)
    for step in range(12):
        sizes = [(int(s), int(s * m)) for s, m in zip(rng.integers(1, 60, 5), rng.integers(80, 900, 5), strict=True)]
        calls = [work("reference", 100.0 * step + i, 0.2 + 3e-4 * t, s, t) for i, (s, t) in enumerate(sizes)]
        learned.observe(calls, NOTHING, 100.0)
    cost = learned.work("reference")
    assert cost is not None
    assert cost.work_s(40, 30_000) == pytest.approx(9.2, rel=0.01)
    assert cost.work_s(1, 100) == pytest.approx(0.23, rel=0.03)


def test_a_gang_takes_as_long_as_its_slowest_rank() -> None:
    gangs = [work("train", 10.0, s, 64, 5000, ranks=2) for s in (2.0, 3.0, 1.5, 1.0)]
    alone = work("train", 12.0, 4.0, 64, 5000)
    assert [c.work_s for c in longest_ranks([*gangs, alone])] == [3.0, 1.5, 4.0]
    learned = LearnedCosts()
    learned.observe(gangs[:2], NOTHING, 10.0)
    cost = learned.work("train")
    assert cost is not None
    assert cost.ranked_s(64, 5000, 2) == pytest.approx(3.0, rel=1e-3)


def test_a_fed_call_is_not_slower_for_what_it_waited() -> None:
    learned = LearnedCosts()
    for tokens in (2000, 5000, 9000):
        waited = work("train", 60.0, 0.5 + 1e-3 * tokens / 4 + 33.0, 64, tokens, ranks=4, waited_s=33.0)
        learned.observe([waited] * 4, NOTHING, 60.0)
    cost = learned.work("train")
    assert cost is not None
    assert cost.ranked_s(64, 5000, 4) == pytest.approx(1.75, rel=0.02)


def test_calls_without_counts_teach_nothing() -> None:
    learned = LearnedCosts()
    bare = CallObservation("reward", "r", "score", False, 0.0, 1.0, 0, 0, 0, 1.0)
    assert learned.observe([bare], NOTHING, 1.0) == {}
    assert learned.work("reward") is None


def test_time_between_calls_is_what_no_call_covers() -> None:
    # [0, 4] and [1, 6] overlap; then nothing until a cold start at 7 whose work ends at 9.
    calls = [work("a", 4.0, 4.0, 1, 1), work("a", 6.0, 5.0, 1, 1), work("b", 9.0, 1.0, 1, 1, start_s=1.0)]
    assert open_s(calls) == 8.0
    assert open_s([]) == 0.0
    learned = LearnedCosts()
    for step_s in (9.5, 9.7, 30.0):
        learned.observe(calls, NOTHING, step_s)
    assert learned.between_s == pytest.approx(1.7)


def test_a_static_planner_recalls_lengths() -> None:
    from orchestrator.planner.base import PastStep

    planner, asked = StaticPlanner(), request()
    planner.recall(PastStep(1, asked.prompts, [[10 * (i + 1)] * 4 for i in range(12)], [], frozenset(), 1.0), 512)
    assert planner.last_length[asked.prompts[-1].prompt_id] == 120.0


def test_gangs_of_different_sizes_tell_what_their_ranks_share() -> None:
    """1 s of every call, 24 s of state and 0.01 s a token shared; of one size alone it is all the call's own."""
    learned, alone = LearnedCosts(), LearnedCosts()
    for step in range(20):
        for model, ranks in ((learned, 2 + step % 5), (alone, 4)):
            tokens, samples = 1000 + 400 * (step % 3), 20 + 7 * (step % 4)
            seconds = 1.0 + (24.0 + 0.01 * tokens) / ranks
            model.observe([work("train", 100.0 * step, seconds, samples, tokens, ranks=ranks)] * ranks, NOTHING, 100.0)
    cost, one = learned.work("train"), alone.work("train")
    assert cost is not None
    assert one is not None
    assert [cost.own_s(1), cost.own_s(8)] == pytest.approx([25.0, 4.0], rel=0.05)
    assert one.shared_s == 0.0
    assert one.own_s(4) == pytest.approx(7.0, rel=0.05)


def test_a_replica_s_first_call_tells_what_loading_takes() -> None:
    learned = LearnedCosts()
    for step in range(12):
        calls = [work("reference", 100.0 * step, 2.5 + 0.001 * 300, 4, 300, start_s=2.0)]
        calls += [work("reference", 100.0 * step + k, 0.1 + 0.001 * 100 * k, 4, 100 * k) for k in range(1, 6)]
        learned.observe(calls, NOTHING, 100.0)
    cost = learned.work("reference")
    assert cost is not None
    assert cost.first_s == pytest.approx(2.4, rel=0.1)
    assert cost.work_s(4, 400) == pytest.approx(0.5, rel=0.1)


def test_in_a_shared_pool_the_wait_for_room_is_no_cold_start() -> None:
    own, shared = LearnedCosts(), LearnedCosts(shared=True)
    for learned in (own, shared):
        starts = [work("train", 10.0 * k, 1.0, 4, 100, start_s=s) for k, s in enumerate((2.0, 9.0, 7.0))]
        learned.observe(starts, NOTHING, 30.0)
    assert (own.start_s("train"), shared.start_s("train")) == (7.0, 2.0)


def cut_call(*, prefill: float, moved: float, moved_s: float) -> CallObservation:
    """Of 10 samples of 100 prompt tokens that came with 50 tokens each; prefill at 1 ms a token."""
    stats = {
        "prefill_tokens": prefill, "shared_tokens": 0.0, "moved_tokens": moved, "decode_tokens": 200.0,
        "decode_steps": 20.0, "prefill_s": 1e-3 * prefill, "moved_s": moved_s, "decode_s": 0.4,
    }  # fmt: skip
    work_s = 0.1 + stats["prefill_s"] + moved_s + 0.4
    return CallObservation(TAIL, "t", "generate", False, 0.0, work_s, 1000, 200, 10, work_s, stats)


def test_what_moving_takes_is_learned_from_calls_that_took_up_keys_and_values() -> None:
    learned = LearnedCosts(Priors(tail=GenerateCost(0.1, 1e-3, 0.02, 0.0, 0.0)))
    learned.observe([cut_call(prefill=0.0, moved=1500.0, moved_s=0.03)], np.full(10, 70.0), None)
    assert learned.tail is not None
    assert learned.tail.moved.prefill_token_s == pytest.approx(2e-5)
    assert learned.tail.call_s == pytest.approx(0.1)  # neither moving nor decoding is overhead


def test_an_engine_that_computes_again_is_not_believed_to_move() -> None:
    """Whatever a roofline promised of its link."""
    prior = GenerateCost(0.1, 1e-3, 0.02, 0.0, 0.0, moved_token_s=1e-6)
    learned = LearnedCosts(Priors(tail=prior))
    for _ in range(4):
        learned.observe([cut_call(prefill=1500.0, moved=0.0, moved_s=0.0)], np.full(10, 70.0), None)
    assert learned.tail is not None
    assert learned.tail.moved.prefill_token_s == pytest.approx(1e-3)
