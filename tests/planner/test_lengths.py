"""EWMA and priors by hand; quality on a distribution that repeats."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator.planner.base import Prompt
from orchestrator.planner.lengths import LengthModel


def prompt(i: int, length: int = 10, source: str = "") -> Prompt:
    return Prompt(i, i, tuple(range(length)), source)


def test_with_zero_history_any_order_of_magnitude_up_to_the_cap_is_as_likely() -> None:
    """Up to 10,000: a quarter of the samples below 10, a quarter above 1,000; on average (10^4 - 1) / ln 10^4."""
    prediction = LengthModel().predict([prompt(1), prompt(2)], 10_000)
    assert prediction.mean.tolist() == pytest.approx([1085.6, 1085.6], abs=0.1)
    assert not prediction.seen.any()
    for share, length in ((0.25, 10), (0.5, 100), (0.75, 1000), (1.0, 10_000)):
        assert prediction.at_quantile(share) == pytest.approx(length, rel=0.01)
    assert np.log10(sorted(prediction.samples(2, seed=0))) == pytest.approx([0.5, 1.5, 2.5, 3.5], abs=0.1)


def test_ewma_by_hand() -> None:
    model = LengthModel(alpha=0.25)
    model.observe({1: [100, 200]})
    model.observe({1: [50]})
    assert model.ewma[1] == 0.25 * 50 + 0.75 * 150
    prediction = model.predict([prompt(1)], 1000)
    assert prediction.mean[0] == pytest.approx(125.0)
    assert bool(prediction.seen[0])


def test_unseen_prompts_get_their_sources_relation_to_prompt_length() -> None:
    model = LengthModel()
    rng = np.random.default_rng(0)
    for epoch in range(6):
        rows = [prompt(100 * epoch + k, int(rng.integers(10, 400)), "math" if k % 2 else "chat") for k in range(60)]
        model.predict(rows, 10_000)
        model.observe({
            p.prompt_id: [2 * (1 + len(p.tokens))] if p.data_source == "math" else [40] for p in rows
        })  # fmt: skip
    prediction = model.predict([prompt(9001, 300, "math"), prompt(9002, 300, "chat"), prompt(9003, 300, "new")], 10_000)
    assert prediction.mean[0] == pytest.approx(602, rel=0.2)
    assert prediction.mean[1] == pytest.approx(40, rel=0.2)
    assert 40 < prediction.mean[2] < 602


def test_predictions_stay_within_the_cap() -> None:
    model = LengthModel()
    model.observe({1: [500]})
    assert model.predict([prompt(1)], 64).mean.tolist() == [64]


def test_ratios_are_the_spread_around_the_prediction() -> None:
    model = LengthModel()
    model.predict([prompt(1), prompt(2)], 1000)
    model.observe({1: [100], 2: [100]})
    model.predict([prompt(1), prompt(2)], 1000)
    model.observe({1: [50], 2: [200]})
    prediction = model.predict([prompt(1)], 1000)
    assert prediction.unseen_ratios.tolist() == [1.0, 1.0]
    assert prediction.ratios.tolist() == pytest.approx([0.5, 2.0])
    assert prediction.at_quantile(1.0)[0] == pytest.approx(prediction.mean[0] * 2)


def test_quality_is_reported_and_rises_when_lengths_repeat() -> None:
    rng = np.random.default_rng(3)
    own = np.exp(rng.normal(5, 0.7, 200))
    model, found = LengthModel(), []
    for _ in range(4):
        model.predict([prompt(i) for i in range(200)], 4096)
        lengths = {i: np.clip(own[i] * np.exp(rng.normal(0, 0.2, 4)), 1, 4096).astype(int).tolist() for i in range(200)}
        found.append(model.observe(lengths))
    assert found[0]["planner/length_r"] == 0.0
    assert found[-1]["planner/length_r"] > 0.9


def test_alpha_is_checked() -> None:
    with pytest.raises(ValueError, match="alpha is 0"):
        LengthModel(alpha=0.0)


def test_a_long_response_is_trusted_as_far_as_it_was_right_before() -> None:
    """One response a prompt, of which half the spread (in logs) is the prompt's own: the best guess is half-way."""
    rng, model = np.random.default_rng(0), LengthModel(alpha=1.0)
    own = rng.normal(0.0, 0.5, 400)
    for _ in range(4):
        rows = [prompt(i) for i in range(400)]
        model.predict(rows, 100_000)
        drawn = np.exp(6.0 + own + rng.normal(0.0, 0.5, 400))
        model.observe({i: [int(drawn[i])] for i in range(400)})
    model.ewma[0], model.ewma[1] = math.exp(7.0), math.exp(5.0)
    low, high = (math.log(model.predict([prompt(i)], 100_000).mean[0]) for i in (1, 0))
    assert 0.9 < high - low < 1.35  # of 2: half, drawn to the whole
    assert (high + low) / 2 == pytest.approx(6.0, abs=0.1)


def test_ratios_are_dealt_out_evenly_over_their_distribution() -> None:
    model = LengthModel()
    model.predict([prompt(i) for i in range(50)], 10_000)
    model.observe({i: [50, 100, 150, 100] for i in range(50)})
    prediction = model.predict([prompt(i) for i in range(50)], 10_000)
    drawn = np.sort(prediction.samples(4, seed=3)) / 100.0
    assert drawn == pytest.approx(
        np.quantile(prediction.ratios, (np.arange(200) + 0.5) / 200, method="nearest"), abs=0.02
    )
