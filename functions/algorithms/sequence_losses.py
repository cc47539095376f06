"""Further policy losses with one ratio for a whole sequence; see policy_losses.py. With r_t and A as there:

vespo     -phi(W) A log pi(y_t), phi(W) = exp(lambda + k log W - lambda W), W = prod_t r_t
geo_mean  -mean_t(A) exp(mean_t min-by-sign(log r_t, clip(log r_t)))
"""

import math

import torch
from torch import Tensor

from functions.algorithms.aggregation import trained_lengths
from functions.algorithms.loss_inputs import LOG_RATIO_BOUND, Inputs, PerToken, policy_loss
from functions.algorithms.ragged import run_sums, runs

LEAST_LOG = math.log(1e-8)


@policy_loss
def vespo(
    inputs: Inputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> PerToken:
    """Variational sequence-level soft policy optimisation (arXiv:2602.10693): a sequence far from pi_old fades out.

    k and lambda are those of A >= 0 and of A < 0. `weights` are part of W (their product over the sequence) and do not
    multiply the loss; a token of weight 0 has no part in either. TRL 1.16 `trl/trainer/grpo_trainer.py`,
    get_gamma_weights.
    """
    found = runs(inputs.segment)
    logs, counts = inputs.bounded.detach(), torch.ones_like(inputs.mask)
    if (rho := inputs.weights) is not None:
        counts = (rho > 0).to(counts.dtype)
        logs = logs + torch.where(rho > 0, rho, 1.0).log().clamp(LEAST_LOG, LOG_RATIO_BOUND)
    log_w = run_sums(logs * inputs.mask, found).clamp(LEAST_LOG, LOG_RATIO_BOUND)[found.position]
    k = torch.where(inputs.advantages >= 0, k_pos, k_neg)
    rate = torch.where(inputs.advantages >= 0, lambda_pos, lambda_neg).clamp(min=1e-4)
    phi = torch.exp(rate + k * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return PerToken(-phi * inputs.advantages * inputs.logprobs * counts, weighed=True)


@policy_loss
def geo_mean(inputs: Inputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PerToken:
    """Geometric-mean policy optimisation (GMPO, arXiv:2507.20673, eq. 4): log-ratios are clipped, then averaged.

    A is the mean over the sequence's trained tokens; `weights` enter by their geometric mean. One loss per sequence,
    so always aggregated as seq-mean-token-mean. verl `compute_policy_loss_geo_mean` (which divides by all sequences).
    """
    found = runs(inputs.segment)
    lengths = trained_lengths(inputs.mask, found).clamp(min=1.0)
    log_ratio = inputs.log_ratio
    limited = log_ratio.clamp(-clip_low, clip_high)
    sign = inputs.advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * limited)

    def mean(values: Tensor) -> Tensor:
        return (run_sums(values, found) / lengths)[found.position]

    # the value of the mean over the sequence, with each token's own gradient: they add up to the sequence's
    share = pessimistic - pessimistic.detach()
    ratio = torch.exp(mean(pessimistic).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) * (1.0 + share)
    losses = -mean(inputs.advantages) * ratio
    if inputs.weights is not None:
        losses = losses * torch.exp(mean(torch.where(inputs.mask == 1, torch.log(inputs.weights + 1e-10), 0.0)))
    outside = log_ratio != limited
    clipped, lower = outside & (inputs.advantages > 0), outside & (inputs.advantages < 0)
    return PerToken(losses, clipped, lower, bound=math.inf, weighed=True)
