"""Properties of all rows together, in combinations of ordinary settings: one prompt, n = 1, equal rewards, masks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functions.algorithms.advantages import ADVANTAGES
from functions.algorithms.aggregation import aggregate, batch_totals
from functions.algorithms.names import AGGREGATIONS, FIXED_AGGREGATION, PAIRS
from functions.algorithms.policy_losses import POLICY_LOSSES
from functions.algorithms.ragged import from_lengths, per_token, segment_sum
from functions.algorithms.resample import Method, resample, resampling_weights
from tests.algorithms.rows import LOSSES, call_loss

lengths_of = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def make(seed: int, lengths: list[int], per_group: int, equal: bool, masked: float) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    segment = from_lengths(lengths=torch.tensor(lengths))
    count, sequences = segment.numel(), len(lengths)
    old = -torch.randn(count, generator=rng).abs()
    scores = torch.ones(sequences) if equal else torch.randint(0, 2, (sequences,), generator=rng).float()
    return {
        "segment": segment,
        "mask": (torch.rand(count, generator=rng) >= masked).float(),
        "group": torch.arange(sequences) // per_group,
        "scores": scores,
        "components": torch.stack([scores, torch.rand(sequences, generator=rng).round(decimals=1)], -1),
        "component_weights": torch.tensor([1.0, 0.5]),
        "baselines": torch.rand(sequences, generator=rng),
        "turn_rewards": torch.zeros(count),
        "anchors": torch.zeros(count),
        "rewards": torch.randn(count, generator=rng),
        "values": torch.randn(count, generator=rng),
        "old_logprobs": old,
        "reference_logprobs": old + 0.1,
        "squared_mass": old.exp().square(),
        "logprobs": old + torch.randn(count, generator=rng) * 0.3,
        "advantages": torch.randn(count, generator=rng),
        "topk_logprobs": torch.log_softmax(torch.randn((count, 4), generator=rng), -1),
        "teacher_logprobs": torch.log_softmax(torch.randn((count, 4), generator=rng), -1),
    }


def wanted(function: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in inspect.signature(function).parameters if name in batch}


def dirty(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, with other numbers wherever the mask is 0."""
    under = batch["mask"] == 0
    return {
        name: torch.where(under[:, None] if value.ndim == 2 else under, torch.full_like(value, -7.0), value)
        if len(value) == len(under) and name not in ("segment", "mask", "scores", "group", "components", "baselines")
        else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in PAIRS])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    lengths=lengths_of,
    per_group=st.sampled_from([1, 2, 3, 8]),
    equal=st.booleans(),
    masked=st.sampled_from([0.0, 0.3]),
)
def test_advantages_are_finite_zero_under_the_mask_and_blind_to_it(
    name: str, seed: int, lengths: list[int], per_group: int, equal: bool, masked: float
) -> None:
    batch = make(seed, lengths, per_group, equal, masked)
    if batch["mask"].sum() < 2:
        return
    estimate = ADVANTAGES[name](**wanted(ADVANTAGES[name], batch))
    assert bool(torch.isfinite(estimate.advantages).all())
    assert bool((estimate.advantages[batch["mask"] == 0] == 0).all())
    assert torch.equal(ADVANTAGES[name](**wanted(ADVANTAGES[name], dirty(batch))).advantages, estimate.advantages)
    compares = {"scores", "components"} & set(inspect.signature(ADVANTAGES[name]).parameters)
    if compares and per_group == 1:
        assert bool((estimate.advantages == 0).all()), "a group of one has nothing to be compared with"
    if "scores" in compares and equal:
        assert bool((estimate.advantages == 0).all()), "equal scores teach nothing"


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    lengths=lengths_of,
    masked=st.sampled_from([0.0, 0.3]),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_losses_are_finite_and_blind_to_what_is_masked(
    name: str, seed: int, lengths: list[int], masked: float, aggregation: str
) -> None:
    batch = make(seed, lengths, 2, False, masked)
    totals = batch_totals(mask=batch["mask"], segment=batch["segment"], num_sequences=len(lengths), norm=5.0)
    if not totals.tokens:
        return
    leaf = "topk_logprobs" if name == "forward_kl_topk" else "logprobs"

    def run(of: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        inputs = wanted(POLICY_LOSSES[name], of) | {leaf: of[leaf].clone().requires_grad_()}
        loss, metrics = call_loss(name, **inputs, totals=totals, aggregation=aggregation)
        assert all(bool(torch.isfinite(value)) for value in metrics.values())
        (gradient,) = torch.autograd.grad(loss, inputs[leaf])
        return loss.detach(), gradient

    loss, gradient = run(batch)
    assert bool(torch.isfinite(loss))
    assert bool((gradient[batch["mask"] == 0] == 0).all())
    again, other = run(dirty(batch))
    assert torch.equal(loss, again)
    assert torch.equal(gradient, other)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clip_cov"])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), lengths=lengths_of, aggregation=st.sampled_from(AGGREGATIONS))
def test_on_policy_every_loss_has_the_plain_policy_gradient(
    name: str, seed: int, lengths: list[int], aggregation: str
) -> None:
    """d/d log pi of -A log pi, aggregated: every ratio is 1 there, every gate open, every penalty flat."""
    batch = make(seed, lengths, 2, False, 0.2)
    totals = batch_totals(mask=batch["mask"], segment=batch["segment"], num_sequences=len(lengths), norm=5.0)
    if not totals.tokens:
        return
    if name == "geo_mean":  # one advantage per sequence
        mean = segment_sum(values=batch["advantages"], segment=batch["segment"], num_sequences=len(lengths))
        batch["advantages"] = per_token(values=mean, segment=batch["segment"])
    where: dict[str, Any] = {key: batch[key] for key in ("segment", "mask")} | {"totals": totals}
    leaf, plain = (batch["old_logprobs"].clone().requires_grad_() for _ in range(2))
    loss, _ = call_loss(
        name, logprobs=leaf, old_logprobs=batch["old_logprobs"], advantages=batch["advantages"],
        aggregation=aggregation, **where,
    )  # fmt: skip
    mode = FIXED_AGGREGATION.get(name, aggregation)
    (expected,) = torch.autograd.grad(aggregate(losses=-batch["advantages"] * plain, aggregation=mode, **where), plain)
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_resampling_follows_its_weights_and_its_seed(method: Method) -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, 1.0]).repeat(2000)
    drawn = resample(scores=scores, method=method, power=2.0, seed=3)
    assert torch.equal(drawn, resample(scores=scores, method=method, power=2.0, seed=3))
    weights = resampling_weights(scores=scores, method=method, power=2.0)
    for score in (0.0, 1.0, 2.0):
        expected = float(weights[scores == score].sum() / weights.sum())
        assert float((scores[drawn] == score).double().mean()) == pytest.approx(expected, abs=0.02)
