"""Further policy losses of single tokens; see policy_losses.py. With r and A as there, s = sg[min(r, cap)]:

    gpg       -A log pi(y_t)
    dppo_tv   -s A log pi(y_t), not where pi has moved from pi_old by more than a bound, away from it
    dppo_kl   the same, the bound on the KL divergence of the two-sided (binary) distributions of y_t
    sapo      -A sigmoid(tau (r - 1)) 4 / tau, with a tau for A > 0 and one for all others
    clip_cov  max(-A r, -A clip(r)), not at the tokens of `chosen`
    kl_cov    -A r, at the tokens of `chosen` + coef |log r|
    dro       -A log pi(y_t) + beta / 2 (log r)^2
Equal to `compute_policy_loss_*` of these names in verl 0.9.1 `verl/trainer/ppo/core_algos.py`, but that log-ratios
are always clamped to +-20 and that `chosen` is of the whole batch (covariance.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals
from functions.algorithms.loss_inputs import Inputs
from functions.algorithms.metrics import Metrics
from functions.algorithms.names import FIXED_AGGREGATION


def gpg(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Plain policy gradient, no ratio (GPG, arXiv:2504.02546, eq. 6). verl `compute_policy_loss_gpg`."""
    inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask)
    return inputs.finish(-inputs.advantages * inputs.logprobs, weights, totals, aggregation)


def dppo_tv(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """DPPO, binary total variation (arXiv:2602.04879): a token trains while pi - pi_old <= clip_high (A > 0), or
    >= -clip_low (otherwise). verl `compute_policy_loss_dppo_tv`, whose clip_ratio_c is `ratio_cap` (section 5.4)."""
    inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask)
    moved = (logprobs.detach().exp() - old_logprobs.exp()).where(mask == 1, 0.0)
    valid = torch.where(inputs.advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _within(inputs, valid, ratio_cap, weights, totals, aggregation)


def dppo_kl(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """DPPO, binary KL (arXiv:2602.04879): a token trains while KL(pi_old || pi) of {y_t, not y_t} is in its bound, or
    pi comes back to pi_old. verl `compute_policy_loss_dppo_kl`."""
    inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask)
    now, old = (values.where(mask == 1, 0.0) for values in (logprobs.detach(), old_logprobs))
    prob, before = now.exp(), old.exp()
    kl = before * (old - now) + (1 - before) * torch.log((1 - before + 1e-8) / (1 - prob + 1e-8))
    up, down = (kl <= clip_high) | (prob <= before), (kl <= clip_low) | (prob >= before)
    return _within(inputs, torch.where(inputs.advantages > 0, up, down), ratio_cap, weights, totals, aggregation)


def _within(
    inputs: Inputs, valid: Tensor, cap: float, weights: Tensor | None, totals: Totals, aggregation: str
) -> tuple[Tensor, Metrics]:
    ratio = inputs.ratio.detach()
    losses = -inputs.advantages * ratio.clamp(max=cap) * inputs.logprobs * valid
    return inputs.finish(losses, weights, totals, aggregation, clipped=~valid, lower=(ratio > cap) & valid)


def sapo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    weights: Tensor | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """Soft adaptive policy optimisation (arXiv:2511.20347, eq. 5-6): a gate that closes smoothly instead of a clip.

    Always aggregated as seq-mean-token-mean. verl `compute_policy_loss_sapo`; TRL loss_type "sapo" without a bound.
    """
    inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask)
    ratio = inputs.ratio
    tau = torch.where(inputs.advantages > 0, tau_pos, tau_neg)
    losses = -inputs.advantages * torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return inputs.finish(losses, weights, totals, FIXED_AGGREGATION["sapo"])


def clip_cov(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    chosen: Tensor,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """PPO's clip, and no gradient at all at the tokens `chosen` (bool [N], covariance.py): those that would lower the
    entropy most. arXiv:2505.22617, section 4.2; verl `compute_policy_loss_clip_cov`."""
    inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask)
    ratio = inputs.ratio
    limited = -inputs.advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    unlimited = -inputs.advantages * ratio
    out = chosen & ~(limited > unlimited)
    return inputs.finish(torch.maximum(unlimited, limited) * ~out, weights, totals, aggregation, clipped=out)


def kl_cov(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    chosen: Tensor,
    weights: Tensor | None = None,
    kl_coef: float = 0.1,
) -> tuple[Tensor, Metrics]:
    """-A r, and a penalty on |log r| at the tokens `chosen` (bool [N], covariance.py).

    arXiv:2505.22617, section 4.3; verl `compute_policy_loss_kl_cov`, whose ppo_kl_coef is `kl_coef`.
    """
    inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask)
    log_ratio = inputs.bounded
    losses = -inputs.advantages * log_ratio.exp() + kl_coef * log_ratio.abs() * chosen
    return inputs.finish(losses, weights, totals, aggregation, clipped=chosen)


def dro(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    weights: Tensor | None = None,
    beta: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """Direct reward optimisation, token by token (arXiv:2405.19107, eq. 4). verl `compute_policy_loss_dro`, which has
    no default for beta."""
    inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask)
    log_ratio = inputs.bounded
    losses = -inputs.advantages * inputs.logprobs + 0.5 * beta * log_ratio.square()
    return inputs.finish(losses, weights, totals, aggregation)
