"""Runs of similar length: every sample once, times against the closed form, T(N) against brute force on small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.assignment import Filler, Run, Workload, makespan_s, shards, sweep, tighten, together
from orchestrator.planner.latency import GenerateCost

DECODE_ONLY = GenerateCost(0.0, 0.0, 1.0, 0.1, 0.0)


def workload(lengths: list[float], n: int = 1, prompt_tokens: float = 0.0) -> Workload:
    mean = np.array(lengths)
    return Workload.of(np.full(len(lengths), prompt_tokens), mean, mean.copy(), n)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 10))
def test_every_sample_is_in_one_run_longest_first(lengths: list[int], n: int, replicas: int) -> None:
    load = workload([float(v) for v in lengths], n, prompt_tokens=20)
    filler = Filler(load, GenerateCost(0.5, 0.01, 1.0, 0.1, 0.001), max_batch=8, kv_tokens=None)
    for count, runs in sweep(filler, replicas).items():
        assert len(runs) == count <= replicas
        dealt = shards(load, runs)
        assert sorted(itertools.chain(*dealt)) == list(range(len(lengths) * n))
        order = [lengths[number // n] for number in itertools.chain(*dealt)]
        assert order == sorted(order, reverse=True)


def test_work_is_the_closed_form() -> None:
    load = workload([100.0, 50.0], n=2, prompt_tokens=10)
    cost = GenerateCost(call_s=1.0, prefill_token_s=0.1, step_s=1.0, sequence_s=0.01, kv_token_s=0.001)
    filler = Filler(load, cost, max_batch=64, kv_tokens=None)
    kv = 2 * (10 * 100 + 5000) + 2 * (10 * 50 + 1250)
    assert filler.work_s(0, 4) == pytest.approx(1 + 0.1 * 20 + 100 + 0.01 * 300 + 0.001 * kv)
    # A run that begins inside a prompt computes that prompt again.
    assert filler.work_s(1, 2) == pytest.approx(1 + 0.1 * 10 + 100 + 0.01 * 100 + 0.001 * (1000 + 5000))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=3, max_size=9), st.integers(2, 3))
def test_tighten_finds_the_best_contiguous_split(lengths: list[int], replicas: int) -> None:
    load = workload([float(v) for v in lengths])
    filler = Filler(load, DECODE_ONLY, max_batch=64, kv_tokens=None)
    cuts = [
        (0, *inner, len(lengths))
        for size in range(replicas)
        for inner in itertools.combinations(range(1, len(lengths)), size)
    ]
    best = min(max(filler.work_s(a, b) for a, b in itertools.pairwise(cut)) for cut in cuts)
    assert makespan_s(tighten(filler, replicas, rounds=40)) == pytest.approx(best)


def test_similar_lengths_stand_together() -> None:
    load = workload([10.0, 500.0, 12.0, 480.0, 11.0, 9.0])
    filler = Filler(load, GenerateCost(0, 0, 1.0, 5.0, 0), max_batch=64, kv_tokens=None)
    assert [sorted(s) for s in shards(load, tighten(filler, 2, rounds=30))] == [[1], [0, 2, 3, 4, 5]]


def test_a_prompt_is_split_only_when_its_prefill_is_worth_less_than_the_balance() -> None:
    def split(prefill_token_s: float) -> bool:
        load = workload([100.0, 100.0, 100.0], n=8, prompt_tokens=100)
        cost = GenerateCost(0.0, prefill_token_s, 0.0, 1.0, 0.0)
        runs = Filler(load, cost, 64, None).fill(1300.0 + 100 * prefill_token_s)
        assert runs is not None
        return any(run.stop % 8 for run in runs)

    assert split(prefill_token_s=0.5)  # 50 s of prefill again, against 500 s of decoding moved
    assert not split(prefill_token_s=9.0)


def test_samples_over_the_slots_wait_for_one() -> None:
    filler = Filler(workload([10.0] * 8), GenerateCost(0, 0, 1.0, 0, 0), max_batch=2, kv_tokens=None)
    assert filler.work_s(0, 8) == 40.0
    runs = filler.fill(20.0)
    assert runs is not None
    assert [(r.start, r.stop) for r in runs] == [(0, 4), (4, 8)]


def test_key_value_capacity_limits_the_slots_and_refuses_what_never_fits() -> None:
    load = workload([80.0] * 4, prompt_tokens=20)
    filler = Filler(load, GenerateCost(0, 0, 1.0, 0, 0), max_batch=64, kv_tokens=200)
    assert filler.slots.tolist() == [2, 2, 2, 2]
    with pytest.raises(ValueError, match=r"20 \+ 80 tokens does not fit .* max_response_length <= 70"):
        Filler(load, DECODE_ONLY, max_batch=64, kv_tokens=90)


def test_sweep_gets_faster_with_more_replicas_and_keeps_the_single_one() -> None:
    rng = np.random.default_rng(5)
    load = workload(np.exp(rng.normal(5, 0.9, 64)).tolist(), n=8, prompt_tokens=100)
    filler = Filler(load, GenerateCost(0.1, 1e-4, 0.01, 2e-4, 1e-8), 256, None)
    curve = sweep(filler, 16)
    times = [makespan_s(runs) for runs in curve.values()]
    assert min(curve) == 1
    assert max(curve) <= 16
    assert times[-1] == pytest.approx(makespan_s(tighten(filler, 16, rounds=40)), rel=0.01)
    assert times == sorted(times, reverse=True)


def test_one_prompt_one_sample() -> None:
    filler = Filler(workload([10.0]), DECODE_ONLY, 64, None)
    assert sweep(filler, 16) == {1: [Run(0, 1, 11.0)]}


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 3)), min_size=1, max_size=30), st.integers(1, 6))
def test_families_stay_whole_unless_they_are_more_than_a_bins_share(rows: list[tuple[int, int]], bins: int) -> None:
    mean, families = np.array([r[0] for r in rows], dtype=float), np.array([r[1] for r in rows])
    found = together(mean, families, bins)
    assert sorted(row for shard in found for row in shard) == list(range(len(rows)))
    assert len(found) <= bins
    for family in set(families.tolist()):
        inside = [shard for shard in found if any(families[row] == family for row in shard)]
        assert len(inside) <= max(1, round(mean[families == family].sum() * bins / mean.sum()))
