"""Cases small enough to compute by hand, for what the peers do not have and for the shape of the rest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functions.algorithms.advantages import ADVANTAGES, distillation, gae, grpo, remax, rloo
from functions.algorithms.aggregation import Totals, aggregate, batch_totals
from functions.algorithms.correction import effective_sample_size, rollout_correction
from functions.algorithms.groups import informative_groups
from functions.algorithms.kl import reward_kl
from functions.algorithms.lagrangian import mix_advantages, update_multiplier
from functions.algorithms.metrics import batch_metrics, combine_metrics
from functions.algorithms.policy_losses import gspo, importance_sampling
from functions.algorithms.ragged import (
    from_lengths,
    keep_sequences,
    segment_sum,
    to_flat,
    to_padded,
)
from functions.algorithms.registry import call_with
from functions.algorithms.rewards import overlong_penalty, penalized_scores, scale_scores, token_rewards


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def near(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual.reshape(-1), t(*expected), atol=1e-6, rtol=1e-6)


SEGMENT = torch.tensor([0, 0, 2, 2, 2])  # sequence 1 is empty
MASK = t(1, 1, 1, 0, 1)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 5) / 4),
        ("token-sum", 1 + 2 + 3 + 5),
        ("seq-mean-token-mean", ((1 + 2) / 2 + (3 + 5) / 2) / 2),
        ("seq-mean-token-sum", (1 + 2 + 3 + 5) / 2),
        ("seq-mean-token-sum-norm", (1 + 2 + 3 + 5) / 2 / 8),
    ],
)
def test_aggregation(aggregation: str, expected: float) -> None:
    totals = batch_totals(mask=MASK, segment=SEGMENT, num_sequences=3, norm=8.0)
    assert totals == Totals(tokens=4, sequences=2, empty=1, norm=8.0)
    losses = t(1, 2, 3, math.nan, 5)
    near(aggregate(losses=losses, mask=MASK, segment=SEGMENT, totals=totals, aggregation=aggregation), expected)


def test_segments() -> None:
    values = t(1, 2, 3, 4, 5)
    near(segment_sum(values=values, segment=SEGMENT, num_sequences=3), 3, 0, 12)
    padded = to_padded(values=values, segment=SEGMENT, num_sequences=3, fill=-1.0)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5]]
    assert torch.equal(to_flat(padded=padded, segment=SEGMENT), values)
    near(keep_sequences(mask=MASK, segment=SEGMENT, keep=torch.tensor([True, True, False])), 1, 1, 0, 0, 0)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_flat_and_padded_are_inverse(lengths: list[int]) -> None:
    segment = from_lengths(lengths=torch.tensor(lengths))
    values = torch.randn(segment.numel())
    padded = to_padded(values=values, segment=segment, num_sequences=len(lengths))
    assert torch.equal(to_flat(padded=padded, segment=segment), values)
    total = segment_sum(values=values, segment=segment, num_sequences=len(lengths))
    torch.testing.assert_close(total, padded.sum(1), atol=1e-5, rtol=1e-5)


def test_grpo_counts_groups_and_gives_equal_scores_exactly_zero() -> None:
    scores = t(0.1, 0.1, 0.1, 0.0, 1.0, 0.7)
    group = torch.tensor([7, 7, 7, 3, 3, 5])
    segment = torch.arange(6)
    mask = torch.ones(6)
    estimate = grpo(scores=scores, group=group, segment=segment, mask=mask, epsilon=0.0001)
    spread = 0.5 / (math.sqrt(0.5) + 0.0001)
    assert torch.nan_to_num(estimate.advantages, nan=9.0)[:3].tolist() == [0, 0, 0]
    near(estimate.advantages, 0, 0, 0, -spread, spread, 0)
    counted = {name: float(value) for name, value in estimate.metrics.items()}
    assert counted == {"critic/groups": 3, "critic/groups_zero_variance": 1, "critic/groups_single": 1}
    assert informative_groups(scores=scores, group=group).tolist() == [False, False, False, True, True, False]


def test_rloo_is_the_score_less_the_mean_of_the_others() -> None:
    estimate = rloo(
        scores=t(1, 2, 6), group=torch.tensor([0, 0, 0]), segment=torch.tensor([0, 1, 2, 2]), mask=torch.ones(4)
    )
    near(estimate.advantages, 1 - 4, 2 - 3.5, 6 - 1.5, 6 - 1.5)


def test_gae_by_hand_steps_over_masked_tokens() -> None:
    estimate = gae(
        rewards=t(0, math.nan, 1),
        values=t(0.5, math.nan, 0.2),
        segment=torch.zeros(3, dtype=torch.int64),
        mask=t(1, 0, 1),
        gamma=0.9,
        lam=0.8,
        whiten_advantages=False,
    )
    last = 1 - 0.2
    first = 0.9 * 0.2 - 0.5 + 0.9 * 0.8 * last
    near(estimate.advantages, first, 0, last)
    near(estimate.returns, first + 0.5, 0, last + 0.2)


def test_rewards_lie_on_the_last_trained_token_and_sum_to_the_penalized_score() -> None:
    scores, kl = t(1.0, 5.0, 2.0), t(0.1, 0.2, 0.3, 9.0, 0.5)
    mask = t(1, 1, 1, 1, 0)
    rewards = token_rewards(scores=scores, segment=SEGMENT, mask=mask, kl=kl, kl_coef=0.5)
    near(rewards, -0.05, 1 - 0.1, -0.15, 2 - 4.5, 0)
    penalized = penalized_scores(scores=scores, segment=SEGMENT, mask=mask, kl=kl, kl_coef=0.5)
    near(penalized, 1 - 0.15, 5, 2 - 4.65)
    near(segment_sum(values=rewards, segment=SEGMENT, num_sequences=3)[[0, 2]], 0.85, -2.65)


def test_remax_subtracts_the_greedy_score() -> None:
    rewards = token_rewards(scores=t(1, 0, 0.5), segment=SEGMENT, mask=MASK)
    estimate = remax(rewards=rewards, baselines=t(0.25, 0, 1), segment=SEGMENT, mask=MASK)
    near(estimate.advantages, 0.75, 0.75, -0.5, 0, -0.5)


def test_score_shaping() -> None:
    near(scale_scores(scores=t(-4, 1, 9), shift=1.0, scale=0.5, low=-2.0, high=3.0), -2, 0, 3)
    penalty = overlong_penalty(lengths=torch.tensor([10, 80, 90, 100]), max_length=100, buffer=20, factor=0.5)
    near(penalty, 0, 0, -0.25, -0.5)


def test_reward_kl_averages_tokens_then_sequences() -> None:
    estimate, mean = reward_kl(
        logprobs=t(-1, -1, -1, math.nan, -1),
        reference_logprobs=t(-2, -1, -1.5, 0, -1.5),
        segment=SEGMENT,
        mask=MASK,
        kind="k1",
    )
    near(estimate, 1, 0, 0.5, 0, 0.5)
    assert mean == pytest.approx(0.5)


def test_gspo_ratio_is_the_geometric_mean_and_every_token_gets_the_gradient() -> None:
    logprobs = t(-1.0, -1.2, -0.5).requires_grad_()
    segment, mask = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    totals = Totals(tokens=3, sequences=1)
    loss, _ = gspo(
        logprobs=logprobs,
        old_logprobs=t(-1.3, -1.1, -0.6),
        advantages=t(2, 2, 2),
        segment=segment,
        mask=mask,
        totals=totals,
        aggregation="seq-mean-token-mean",
        clip_low=0.5,
        clip_high=0.5,
    )
    ratio = math.exp((0.3 - 0.1 + 0.1) / 3)
    near(loss, -2 * ratio)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    near(gradient, *[-2 * ratio / 3] * 3)


def test_distillation_descends_the_exact_reverse_kl() -> None:
    """In expectation over the student's tokens the gradient is that of KL(student || teacher)."""
    logits = t(0.3, -0.2, 1.0).requires_grad_()
    teacher = torch.log_softmax(t(1.0, 0.5, -0.5), 0)
    student = torch.log_softmax(logits, 0)
    exact = (student.exp() * (student - teacher)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    one, ones = torch.arange(3), torch.ones(3)
    old = student.detach()
    advantages = distillation(old_logprobs=old, reference_logprobs=teacher, segment=one, mask=ones).advantages
    loss, _ = importance_sampling(
        logprobs=student,
        old_logprobs=old,
        advantages=advantages,
        segment=one,
        mask=ones,
        weights=old.exp(),  # each token as often as the student samples it
        totals=Totals(tokens=3, sequences=3),
        aggregation="token-sum",
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)


def test_multiplier_rises_above_the_limit_falls_below_and_stays_in_bounds() -> None:
    up = update_multiplier(multiplier=2.0, mean_cost=3.0, limit=1.0, lr=0.1, maximum=10.0)
    assert up == pytest.approx(2.0 * math.exp(0.1 * 2.0 * 2.0))
    down = update_multiplier(multiplier=2.0, mean_cost=0.0, limit=1.0, lr=0.1, maximum=10.0)
    assert down == pytest.approx(2.0 * math.exp(-0.2))
    assert update_multiplier(multiplier=2.0, mean_cost=1e6, limit=0.0, lr=1.0, maximum=10.0) == pytest.approx(10.0)
    assert update_multiplier(multiplier=2.0, mean_cost=-1e6, limit=0.0, lr=1.0, maximum=10.0) > 0
    near(mix_advantages(rewards=t(1, -1), costs=t(2, 0), multiplier=0.5), 0, -1 / 1.5)


def test_effective_sample_size_of_two_unequal_weights() -> None:
    correction = rollout_correction(
        logprobs=t(math.log(0.5), 0.0),
        rollout_logprobs=t(0.0, math.log(0.5)),
        segment=torch.tensor([0, 1]),
        mask=torch.ones(2),
        totals=Totals(tokens=2, sequences=2),
        cap=1.5,
    )
    near(correction.weights, 0.5, 1.5)
    metrics = combine_metrics([correction.metrics])
    assert effective_sample_size(metrics) == pytest.approx((2.0**2 / 2) / (0.25 + 2.25))
    assert metrics["rollout_corr/abs_diff_max"] == pytest.approx(math.log(2))
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)


def test_metrics_combine_by_name() -> None:
    combined = combine_metrics([{"a/mean": 0.25, "a/max": 1.0, "a_min": 3.0}, {"a/mean": 0.5, "a/max": 2.0}])
    assert combined == {"a/mean": 0.75, "a/max": 2.0, "a_min": 3.0}


def test_explained_variance_is_one_for_a_perfect_critic() -> None:
    returns = t(1, 2, 3, 0, 5)
    metrics = batch_metrics(
        scores=t(1, 0, 0), mask=MASK, segment=SEGMENT, advantages=returns, returns=returns, values=returns
    )
    assert metrics["critic/vf_explained_var"] == 1.0
    assert metrics["critic/returns/mean"] == pytest.approx(11 / 4)
    assert metrics["critic/score/max"] == 1.0


def test_call_with_passes_what_is_named_and_refuses_the_rest() -> None:
    tensors = {"scores": t(1, 2), "group": torch.tensor([0, 0]), "segment": torch.tensor([0, 1]), "mask": t(1, 1)}
    estimate = call_with(ADVANTAGES["dr_grpo"], {**tensors, "values": t(0, 0)})
    near(estimate.advantages, -0.5, 0.5)
    with pytest.raises(ValueError, match="gae: needs rewards, values, which"):
        call_with(ADVANTAGES["gae"], {**tensors, "values": None})
    with pytest.raises(ValueError, match="dr_grpo: no option gama; it takes scores, group"):
        call_with(ADVANTAGES["dr_grpo"], tensors, {"gama": 0.9})
