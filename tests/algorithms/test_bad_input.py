"""Empty response, masked sample, group of one, NaN, infinity, overflow: defined, never a silent NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functions.algorithms.advantages import ADVANTAGES
from functions.algorithms.aggregation import Totals, batch_totals
from functions.algorithms.correction import rollout_correction
from functions.algorithms.entropy import entropy_loss
from functions.algorithms.estimate import whiten
from functions.algorithms.groups import group_stats
from functions.algorithms.kl import kl_loss, reward_kl
from functions.algorithms.names import AGGREGATIONS
from functions.algorithms.policy_losses import POLICY_LOSSES
from functions.algorithms.ragged import segment_sum
from functions.algorithms.value_loss import value_loss
from tests.algorithms.rows import LOSSES, call_loss

# sequence 0 has two tokens, 1 is empty, 2 is masked throughout, 3 has one trained token
SEGMENT = torch.tensor([0, 0, 2, 3])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0])
TOTALS = batch_totals(mask=MASK, segment=SEGMENT, num_sequences=4, norm=4.0)


def tensors(**replaced: Tensor) -> dict[str, Tensor]:
    base = {
        "logprobs": torch.tensor([-1.0, -2.0, -0.5, -0.1]),
        "old_logprobs": torch.tensor([-1.1, -2.0, -0.5, -0.2]),
        "reference_logprobs": torch.tensor([-1.2, -2.5, -0.5, -0.3]),
        "rollout_logprobs": torch.tensor([-1.0, -2.1, -0.5, -0.1]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0]),
        "values": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "old_values": torch.tensor([0.0, 0.2, 0.3, 0.4]),
        "returns": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "entropy": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "rewards": torch.tensor([0.0, 1.0, 0.0, 0.5]),
        "weights": torch.tensor([1.0, 0.5, 1.0, 2.0]),
    }
    return base | replaced


Call = Callable[[dict[str, Tensor]], Any]
PLACE: dict[str, Any] = {"segment": SEGMENT, "mask": MASK}
LOSS: dict[str, Any] = {**PLACE, "totals": TOTALS, "aggregation": "token-mean"}


def pick(inputs: dict[str, Tensor], *names: str) -> dict[str, Any]:
    return {name: inputs[name] for name in names}


def policy_loss(name: str) -> tuple[tuple[str, ...], Call]:
    arguments = ("logprobs", "old_logprobs", "advantages", "weights")
    return arguments, lambda inputs: call_loss(name, **pick(inputs, *arguments), **LOSS)


CALLS: dict[str, tuple[tuple[str, ...], Call]] = {
    **{name: policy_loss(name) for name in LOSSES},
    "kl_loss": (
        ("logprobs", "reference_logprobs"),
        lambda x: kl_loss(**pick(x, "logprobs", "reference_logprobs"), **LOSS, kind="k3", coef=0.1),
    ),
    "reward_kl": (
        ("logprobs", "reference_logprobs"),
        lambda x: reward_kl(**pick(x, "logprobs", "reference_logprobs"), **PLACE, kind="k1"),
    ),
    "value_loss": (
        ("values", "old_values", "returns"),
        lambda x: value_loss(**pick(x, "values", "old_values", "returns"), **LOSS),
    ),
    "entropy_loss": (("entropy",), lambda x: entropy_loss(**pick(x, "entropy"), **LOSS, coef=0.1)),
    "rollout_correction": (
        ("logprobs", "rollout_logprobs"),
        lambda x: rollout_correction(**pick(x, "logprobs", "rollout_logprobs"), **PLACE, totals=TOTALS),
    ),
    "gae": (("rewards", "values"), lambda x: ADVANTAGES["gae"](**pick(x, "rewards", "values"), **PLACE)),
    "reinforce_plus_plus": (
        ("rewards",),
        lambda x: ADVANTAGES["reinforce_plus_plus"](**pick(x, "rewards"), **PLACE),
    ),
    "distillation": (
        ("old_logprobs", "reference_logprobs"),
        lambda x: ADVANTAGES["distillation"](**pick(x, "old_logprobs", "reference_logprobs"), **PLACE),
    ),
}
FAULTS = [(name, argument) for name, (arguments, _) in CALLS.items() for argument in arguments]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "argument"), FAULTS)
def test_a_number_that_is_not_finite_names_its_sequence(name: str, argument: str, value: float) -> None:
    broken = tensors()[argument].clone()
    broken[1] = value
    with pytest.raises(ValueError, match=rf"^{argument}: -?(nan|inf) at token 1 of sequence 0; must be finite"):
        CALLS[name][1](tensors(**{argument: broken}))


@pytest.mark.parametrize(("name", "argument"), FAULTS)
def test_what_lies_under_the_mask_is_never_read(name: str, argument: str) -> None:
    dirty = tensors()[argument].clone()
    dirty[2] = math.nan

    def leaves(result: Any) -> list[Tensor]:
        if isinstance(result, dict):
            return [torch.as_tensor(value) for value in result.values()]
        if isinstance(result, tuple):
            return [leaf for part in result for leaf in leaves(part)]
        return [torch.as_tensor(result)]

    clean = leaves(CALLS[name][1](tensors()))
    for before, after in zip(clean, leaves(CALLS[name][1](tensors(**{argument: dirty}))), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_nan_under_the_mask_leaves_no_nan_in_the_gradient(name: str, aggregation: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, math.nan, -0.1], requires_grad=True)
    inputs = pick(tensors(), "old_logprobs", "advantages")
    loss, _ = call_loss(name, logprobs=logprobs, **inputs, **{**LOSS, "aggregation": aggregation})
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[2] == 0
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient[[0, 1, 3]] != 0).any())


def test_empty_and_masked_sequences_are_in_no_denominator_but_counted() -> None:
    assert Totals(tokens=3, sequences=2, empty=2, norm=4.0) == TOTALS


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_the_score_of_an_empty_response_counts_in_its_groups_baseline(name: str) -> None:
    group = torch.tensor([0, 0, 1, 1])
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0])
    first = ADVANTAGES[name](scores=scores, group=group, **PLACE).advantages
    scores[1] = 1.0  # now the group of sequence 0 is all equal
    second = ADVANTAGES[name](scores=scores, group=group, **PLACE).advantages
    assert first[0] > second[0]
    assert second[2] == 0


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk"]
)
def test_a_group_of_one_has_advantage_zero(name: str) -> None:
    scores = torch.tensor([5.0, 0.0, 1.0])
    estimate = ADVANTAGES[name](
        scores=scores, group=torch.tensor([9, 4, 4]), segment=torch.tensor([0, 1, 2]), mask=torch.ones(3)
    )
    assert estimate.advantages[0] == 0
    assert estimate.advantages[2] > 0
    assert float(estimate.metrics["critic/groups_single"]) == 1


def test_a_score_that_is_not_finite_names_its_sequence() -> None:
    with pytest.raises(ValueError, match=r"^scores: nan at sequence 2; must be finite"):
        group_stats(torch.tensor([0.0, 1.0, math.nan]), torch.tensor([0, 0, 0]))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [90.0, -90.0])
def test_ratio_overflow_is_bounded_and_counted(name: str, log_ratio: float) -> None:
    logprobs = torch.tensor([-0.1, -0.1, -0.5, -0.1], requires_grad=True)
    old = torch.tensor([-0.1, -0.1, -0.5, -0.1 - log_ratio])
    loss, metrics = call_loss(
        name, logprobs=logprobs, old_logprobs=old, advantages=torch.tensor([1.0, 1.0, 1.0, -1.0]), **LOSS
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert math.isfinite(float(loss.detach()))
    assert bool(torch.isfinite(gradient).all())
    counted = 1 / 3 if log_ratio > 0 or name != "gspo" else 0.0  # exp(-90 / |y|) is no overflow
    assert float(metrics["actor/ratio_overflow"]) == pytest.approx(counted)


def test_correction_overflow_is_bounded_and_counted() -> None:
    inputs = pick(tensors(rollout_logprobs=torch.tensor([-95.0, -2.0, -0.5, -0.1])), "logprobs", "rollout_logprobs")
    correction = rollout_correction(**inputs, **PLACE, totals=TOTALS, level="sequence", cap=2.0)
    assert correction.weights.tolist() == pytest.approx([2.0, 2.0, 0.0, 1.0])
    assert all(math.isfinite(float(value)) for value in correction.metrics.values())
    assert float(correction.metrics["rollout_corr/ratio_overflow"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", LOSSES)
def test_a_part_without_trained_tokens_has_loss_zero_and_gradient_zero(name: str) -> None:
    """A rank whose share was rejected must still take part in backward."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    two = torch.tensor([-1.0, -1.0])
    loss, metrics = call_loss(
        name,
        logprobs=logprobs,
        old_logprobs=two,
        advantages=two,
        **{**LOSS, "segment": SEGMENT[:2], "mask": torch.zeros(2)},
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss == 0
    assert gradient.tolist() == [0, 0]
    assert all(value == 0 for value in metrics.values())


def test_a_batch_without_trained_tokens_raises() -> None:
    nothing = torch.zeros(4)
    totals = batch_totals(mask=nothing, segment=SEGMENT, num_sequences=4)
    assert totals == Totals(tokens=0, sequences=0, empty=4)
    inputs = pick(tensors(), "logprobs", "old_logprobs", "advantages")
    for aggregation in AGGREGATIONS:
        with pytest.raises(ValueError, match="no trained token; skip the step"):
            POLICY_LOSSES["vanilla"](**inputs, segment=SEGMENT, mask=nothing, totals=totals, aggregation=aggregation)


def test_whitening_one_token_raises() -> None:
    with pytest.raises(ValueError, match="at least two trained tokens in the batch, got 1"):
        whiten(values=torch.ones(2), mask=torch.tensor([1.0, 0.0]))


def test_what_is_laid_out_wrongly_is_refused() -> None:
    with pytest.raises(ValueError, match="the tokens of sequence 0 are not adjacent"):
        segment_sum(values=torch.ones(3), segment=torch.tensor([0, 1, 0]), num_sequences=2)
    with pytest.raises(ValueError, match=r"numbers 0\.\.3 must lie in \[0, 3\)"):
        segment_sum(values=torch.ones(4), segment=SEGMENT, num_sequences=3)
    with pytest.raises(ValueError, match="must hold only 0 and 1"):
        batch_totals(mask=MASK * 0.5, segment=SEGMENT, num_sequences=4)
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm needs one above 0"):
        POLICY_LOSSES["vanilla"](
            **pick(tensors(), "logprobs", "old_logprobs", "advantages"),
            **{**LOSS, "totals": Totals(tokens=3, sequences=2), "aggregation": "seq-mean-token-sum-norm"},
        )
    with pytest.raises(ValueError, match="'token_mean' is unknown, must be one of token-mean"):
        POLICY_LOSSES["vanilla"](
            **pick(tensors(), "logprobs", "old_logprobs", "advantages"), **{**LOSS, "aggregation": "token_mean"}
        )
