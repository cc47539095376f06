"""Any split of a batch into micro-batches, packs or ranks adds up to the whole batch: losses, gradients and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functions.algorithms.aggregation import Totals, batch_totals
from functions.algorithms.correction import rollout_correction
from functions.algorithms.entropy import entropy_loss
from functions.algorithms.kl import kl_loss
from functions.algorithms.metrics import combine_metrics
from functions.algorithms.names import AGGREGATIONS, KL_KINDS
from functions.algorithms.ragged import from_lengths
from functions.algorithms.value_loss import value_loss
from tests.algorithms.rows import LOSSES, call_loss

Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
Batch = dict[str, Tensor]


def make_batch(seed: int, lengths: list[int]) -> Batch:
    """A ragged batch with empty sequences, masked tokens and wide log-ratios."""
    rng = torch.Generator().manual_seed(seed)
    segment = from_lengths(lengths=torch.tensor(lengths))
    count = segment.numel()

    def normal(scale: float) -> Tensor:
        return torch.randn(count, generator=rng) * scale

    old = -normal(1.0).abs()
    return {
        "segment": segment,
        "mask": (torch.rand(count, generator=rng) < 0.8).float(),
        "logprobs": old + normal(0.3),
        "old_logprobs": old,
        "reference_logprobs": old + normal(0.5),
        "rollout_logprobs": old + normal(0.2),
        "advantages": normal(1.0),
        "weights": normal(1.0).abs(),
        "values": normal(1.0),
        "old_values": normal(1.0),
        "returns": normal(1.0),
        "entropy": normal(1.0).abs(),
        "chosen": normal(1.0) > 1.0,
    }


def kl(
    *, logprobs: Tensor, kind: str, batch: Batch, totals: Totals, aggregation: str
) -> tuple[Tensor, dict[str, Tensor]]:
    return kl_loss(
        logprobs=logprobs,
        reference_logprobs=batch["reference_logprobs"],
        segment=batch["segment"],
        mask=batch["mask"],
        totals=totals,
        aggregation=aggregation,
        kind=kind,
        coef=0.1,
    )


def losses(batch: Batch, totals: Totals, aggregation: str) -> dict[str, tuple[Tensor, Tensor, dict[str, float]]]:
    """name -> (loss, gradient in what it trains, metrics), of every loss there is."""
    shared: dict[str, Any] = {
        "segment": batch["segment"],
        "mask": batch["mask"],
        "totals": totals,
        "aggregation": aggregation,
    }
    results = {}
    for name in LOSSES:
        leaf = batch["logprobs"].clone().requires_grad_()
        inputs: dict[str, Any] = {key: batch[key] for key in ("old_logprobs", "advantages", "weights")}
        loss, metrics = call_loss(name, logprobs=leaf, chosen=batch["chosen"], **inputs, **shared)
        results[name] = (loss, leaf, metrics)
    for kind in KL_KINDS:
        leaf = batch["logprobs"].clone().requires_grad_()
        loss, metrics = kl(logprobs=leaf, kind=kind, batch=batch, totals=totals, aggregation=aggregation)
        results[f"kl {kind}"] = (loss, leaf, metrics)
    leaf = batch["values"].clone().requires_grad_()
    inputs = {key: batch[key] for key in ("old_values", "returns")}
    loss, metrics = value_loss(values=leaf, **inputs, **shared)
    results["value"] = (loss, leaf, metrics)
    leaf = batch["entropy"].clone().requires_grad_()
    loss, metrics = entropy_loss(entropy=leaf, coef=0.01, **shared)
    results["entropy"] = (loss, leaf, metrics)
    out = {}
    for name, (loss, leaf, metrics) in results.items():
        (gradient,) = torch.autograd.grad(loss, leaf)
        out[name] = (loss.detach(), gradient, combine_metrics([metrics]))
    return out


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    parts=st.integers(1, 5),
    aggregation=st.sampled_from(list(AGGREGATIONS)),
)
def test_parts_add_up_to_the_whole_batch(seed: int, lengths: list[int], parts: int, aggregation: str) -> None:
    batch = make_batch(seed, lengths)
    totals = batch_totals(mask=batch["mask"], segment=batch["segment"], num_sequences=len(lengths), norm=12.0)
    if totals.tokens == 0:
        return
    # sequences go to parts at random and lie within a part in random order, as after length-balanced packing
    rng = torch.Generator().manual_seed(seed)
    owner = torch.randint(parts, (len(lengths),), generator=rng)
    place = torch.randperm(len(lengths), generator=rng)
    picks = []
    for part in range(parts):
        tokens = (owner[batch["segment"]] == part).nonzero()[:, 0]
        picks.append(tokens[torch.argsort(place[batch["segment"][tokens]], stable=True)])
    whole = losses(batch, totals, aggregation)
    pieces = [losses({key: value[pick] for key, value in batch.items()}, totals, aggregation) for pick in picks]
    scale = max(1.0, totals.tokens) if aggregation == "token-sum" else 1.0
    for name, (loss, gradient, metrics) in whole.items():
        added = torch.stack([piece[name][0] for piece in pieces]).sum()
        assert abs(float(added - loss)) <= 1e-6 * scale * max(1.0, abs(float(loss))), name
        scattered = torch.zeros_like(gradient)
        for pick, piece in zip(picks, pieces, strict=True):
            scattered[pick] += piece[name][1]
        torch.testing.assert_close(scattered, gradient, atol=1e-6, rtol=1e-6)
        combined = combine_metrics(piece[name][2] for piece in pieces)
        for key, value in metrics.items():
            assert combined[key] == pytest.approx(value, abs=1e-6 * scale, rel=1e-6), (name, key)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_totals_of_ranks_add_up(seed: int, lengths: list[int]) -> None:
    batch = make_batch(seed, lengths)
    whole = batch_totals(mask=batch["mask"], segment=batch["segment"], num_sequences=len(lengths), norm=9.0)
    cut = len(lengths) // 2
    first = batch["segment"] < cut
    ranks = [
        batch_totals(mask=batch["mask"][first], segment=batch["segment"][first], num_sequences=cut, norm=9.0),
        batch_totals(
            mask=batch["mask"][~first], segment=batch["segment"][~first], num_sequences=len(lengths) - cut, norm=9.0
        ),
    ]
    assert ranks[0] + ranks[1] == whole


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=9),
    level=st.sampled_from(["token", "sequence"]),
)
def test_correction_of_parts_is_correction_of_the_whole(seed: int, lengths: list[int], level: str) -> None:
    batch = make_batch(seed, lengths)
    totals = batch_totals(mask=batch["mask"], segment=batch["segment"], num_sequences=len(lengths))
    if totals.tokens == 0:
        return
    names = ("logprobs", "rollout_logprobs", "segment", "mask")

    def inputs(pick: Tensor) -> dict[str, Any]:
        return {name: batch[name][pick] for name in names} | {"level": level}

    def correct(pick: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return rollout_correction(
            **inputs(pick),
            totals=totals,
            cap=1.5,
            reject={"token_k3": 0.5, "seq_mean_k1": (0.5, 2.0), "seq_max_k2": 0.4},
        )

    whole = correct(torch.arange(batch["segment"].numel()))
    cut = batch["segment"] < len(lengths) // 2
    parts = [correct(cut.nonzero()[:, 0]), correct((~cut).nonzero()[:, 0])]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole[0], atol=0, rtol=0)
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])
    combined = combine_metrics(part[2] for part in parts)
    for key, value in combine_metrics([whole[2]]).items():
        assert combined[key] == pytest.approx(value, rel=2e-6, abs=1e-6), key
