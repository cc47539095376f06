"""Divergence from the reference policy, estimated at the sampled tokens: in the loss or in the reward.

With d = log pi(y_t) - log pi_ref(y_t), y_t ~ pi (Schulman 2020, http://joschu.net/blog/kl-approx.html):
    k1   d                              unbiased
    k2   d^2 / 2                        biased value; its gradient is the unbiased gradient of the KL
    k3   exp(-d) + d - 1                unbiased, never negative; d clamped to +-20, the value to +-10
    abs  |d|
    k1+, k3+, abs+                      value of k1, k3, abs; gradient of k2 (straight-through)
Equal to verl `verl/trainer/ppo/core_algos.py:kl_penalty` and `kl_penalty_forward`.
"""

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate
from functions.algorithms.metrics import Metrics
from functions.algorithms.names import KL_KINDS
from functions.algorithms.ragged import checked, run_sums, runs


def kl_estimate(*, logprobs: Tensor, reference_logprobs: Tensor, kind: str) -> Tensor:
    """[N]: the estimate at each token, with its gradient in `logprobs`."""
    difference = logprobs - reference_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            log_ratio = torch.clamp(-difference, min=-20.0, max=20.0)
            return torch.clamp(torch.exp(log_ratio) - log_ratio - 1.0, min=-10.0, max=10.0)
        case "abs":
            return difference.abs()
        case "k1+" | "k3+" | "abs+":
            value = kl_estimate(logprobs=logprobs.detach(), reference_logprobs=reference_logprobs, kind=kind[:-1])
            gradient = 0.5 * difference.square()
            return gradient - gradient.detach() + value
    raise ValueError(f"kl kind: {kind!r} is unknown, must be one of {', '.join(KL_KINDS)}")


def kl_loss(
    *,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    kind: str,
    coef: float,
) -> tuple[Tensor, Metrics]:
    """coef * aggregate(kl_estimate): the KL term added to the policy loss (GRPO, arXiv:2402.03300, eq. 3-4).

    All [N]. Metric: actor/kl_loss, without the coefficient.
    """
    estimate = kl_estimate(
        logprobs=checked("logprobs", logprobs, segment, mask),
        reference_logprobs=checked("reference_logprobs", reference_logprobs, segment, mask),
        kind=kind,
    )
    mean = aggregate(losses=estimate, mask=mask, segment=segment, totals=totals, aggregation=aggregation)
    return coef * mean, {"actor/kl_loss": mean.detach()}


def reward_kl(
    *, logprobs: Tensor, reference_logprobs: Tensor, segment: Tensor, mask: Tensor, kind: str
) -> tuple[Tensor, float]:
    """The KL to take out of the reward: ([N] estimate per token, 0 under the mask; its mean over sequences).

    `logprobs` are those of the policy that sampled. The mean is over the tokens of each sequence, then over the
    sequences with trained tokens: the number that `adaptive_kl_coef` steers and the metric actor/reward_kl_penalty.
    As verl `verl/trainer/ppo/ray_trainer.py:apply_kl_penalty`. Whole batch.
    """
    estimate = kl_estimate(
        logprobs=checked("logprobs", logprobs, segment, mask),
        reference_logprobs=checked("reference_logprobs", reference_logprobs, segment, mask),
        kind=kind,
    ).detach()
    estimate = torch.where(mask == 1, estimate, torch.zeros_like(estimate))
    found = runs(segment)
    lengths = run_sums(mask, found)
    means = run_sums(estimate, found)[lengths > 0] / lengths[lengths > 0]
    if means.numel() == 0:
        raise ValueError("mask: the batch has no trained token; skip the step")
    return estimate, float(means.double().mean())


def adaptive_kl_coef(*, coef: float, kl: float, target: float, horizon: float, sequences: int) -> float:
    """The next coefficient: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon).

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2; verl `core_algos.py:AdaptiveKLController`. A fixed
    coefficient is one that is not updated.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"adaptive KL: target and horizon must be above 0, got {target} and {horizon}")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * sequences / horizon)
