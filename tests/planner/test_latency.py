"""The decode formula against a step-by-step count; least squares against known coefficients, priors and forgetting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planner.latency import GenerateCost, LinearFit, WorkCost, kv_token_steps, relative_errors
from orchestrator.planner.rollout import finish_times_s, queued
from orchestrator.simulation.decoding import Item, schedule

COST = GenerateCost(call_s=1.0, prefill_token_s=0.01, step_s=0.5, sequence_s=0.02, kv_token_s=0.001)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=8))
def test_finish_times_are_those_of_counting_every_step(samples: list[tuple[int, int]]) -> None:
    samples.sort(key=lambda s: s[1])
    prompt, length = (np.array(v, dtype=float) for v in zip(*samples, strict=True))
    now_s, counted = 1.0 + 0.01 * prompt.sum(), [0.0] * len(samples)
    for step in range(1, int(length[-1]) + 1):
        active = length >= step
        # Mid-step count of tokens held: that makes the sum over steps exactly P L + L^2 / 2.
        now_s += 0.5 + 0.02 * active.sum() + 0.001 * (prompt + step - 0.5)[active].sum()
        for i in np.flatnonzero(length == step):
            counted[i] = now_s
    ours = finish_times_s(prompt, length, COST, max_batch=64, prefill_tokens=prompt.sum())
    np.testing.assert_allclose(ours, counted)
    kv = kv_token_steps(prompt, length).sum()
    assert COST.work_s(prompt.sum(), length[-1], length.sum(), kv) == pytest.approx(counted[-1])


def test_queued_samples_take_the_tokens_over_the_slots() -> None:
    ours = finish_times_s(np.zeros(4), np.full(4, 10.0), GenerateCost(0, 0, 1, 0, 0), max_batch=2, prefill_tokens=0)
    assert ours[-1] == 20.0


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=12), st.integers(1, 4))
def test_queued_samples_finish_as_in_the_simulated_engine(samples: list[tuple[int, int]], slots: int) -> None:
    """Prompts that differ: each is computed when its sample is let in."""
    prompt, length = (np.array(v, dtype=float) for v in zip(*samples, strict=True))
    items = [Item(k, p, 0, n) for k, (p, n) in enumerate(samples)]
    engine = schedule(items, COST, slots=slots, kv_tokens=None)
    starts, ours = queued(prompt, length, COST, max_batch=slots, prefill_tokens=float(prompt.sum()))
    np.testing.assert_allclose(ours, engine.finish_s)
    np.testing.assert_allclose(starts, engine.begin_step)


def test_samples_that_were_cut_come_with_their_keys_and_values_where_those_move() -> None:
    """Two of one prompt of 5 tokens: one with 3 of its 4 response tokens, one with none of its 2."""
    items = [Item(0, 5, 3, 4), Item(0, 5, 0, 2)]
    again = schedule(items, COST, slots=2, kv_tokens=None)
    assert (again.prefill_tokens, again.moved_tokens) == (5 + 3, 0)
    moved = schedule(items, replace(COST, moved_token_s=0.002), slots=2, kv_tokens=None)
    assert (moved.prefill_tokens, moved.moved_tokens, moved.moved_s) == (5, 8, 8 * 0.002)
    np.testing.assert_allclose(moved.finish_s - again.finish_s, 8 * 0.002 - 3 * 0.01)


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    rng = np.random.default_rng(1)
    x = np.column_stack((rng.integers(100, 2000, 40), rng.integers(1000, 90_000, 40), rng.integers(10**5, 10**7, 40)))
    truth = np.array([0.011, 5e-5, 9e-8])
    fit = LinearFit(3, prior=[0.02, 1e-5, 5e-8], k=1e-9)
    fit.observe(x.astype(float), x @ truth)
    assert fit.theta is not None
    np.testing.assert_allclose(fit.theta, truth, rtol=1e-3)


def test_prior_counts_before_and_fades_after_observations() -> None:
    fit = LinearFit(1, prior=[2.0], k=1.0)
    assert fit.predict(np.array([[3.0]]))[0] == 6.0
    errors = []
    for _ in range(30):
        fit.observe(np.ones((4, 1)), np.full(4, 1.0))
        errors.append(abs(fit.predict(np.ones((1, 1)))[0] - 1.0))
    assert errors[0] > errors[5] > errors[-1]
    assert errors[-1] < 0.02


def test_fit_follows_a_change() -> None:
    fit = LinearFit(1, decay=0.8)
    for seconds in [1.0] * 20 + [3.0] * 30:
        fit.observe(np.ones((2, 1)), np.full(2, seconds))
    assert fit.predict(np.ones((1, 1)))[0] == pytest.approx(3.0, rel=0.05)


def test_times_that_scatter_are_predicted_by_their_mean() -> None:
    rng, fit = np.random.default_rng(3), LinearFit(1, decay=0.95)
    for _ in range(60):
        fit.observe(np.ones((8, 1)), 2.0 * rng.lognormal(-0.045, 0.3, 8))
    assert fit.predict(np.ones((1, 1)))[0] == pytest.approx(2.0, rel=0.04)  # weighed by 1 / y: 1.7


def test_coefficients_are_never_negative() -> None:
    rng = np.random.default_rng(2)
    steps = rng.integers(100, 200, 50).astype(float)
    x = np.column_stack((steps, 10 * steps + rng.normal(0, 1, 50)))
    fit = LinearFit(2)
    fit.observe(x, 0.01 * steps * rng.normal(1, 0.05, 50))
    assert fit.theta is not None
    assert (fit.theta >= 0).all()
    np.testing.assert_allclose(fit.predict(x), 0.01 * steps, rtol=0.1)


def test_nothing_known_is_an_error_and_zero_times_say_nothing() -> None:
    fit = LinearFit(1)
    fit.observe(np.ones((1, 1)), np.zeros(1))
    with pytest.raises(ValueError, match="cannot be predicted yet"):
        fit.predict(np.ones((1, 1)))
    with pytest.raises(ValueError, match="prior has 2"):
        LinearFit(1, prior=[1.0, 2.0])


def test_work_cost_and_errors() -> None:
    assert WorkCost(1.0, 0.5, 0.01).work_s(4, 100) == 4.0
    np.testing.assert_allclose(relative_errors(np.array([2.0, 5.0, 1.0]), np.array([4.0, 4.0, 0.0])), [0.5, 0.25])
