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

import torch
from torch import Tensor

from functions.algorithms.loss_inputs import Inputs, PerToken, policy_loss


@policy_loss
def gpg(inputs: Inputs) -> PerToken:
    """Plain policy gradient, no ratio (GPG, arXiv:2504.02546, eq. 6). verl `compute_policy_loss_gpg`."""
    return PerToken(-inputs.advantages * inputs.logprobs)


@policy_loss
def dppo_tv(inputs: Inputs, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_cap: float = 20.0) -> PerToken:
    """DPPO, binary total variation (arXiv:2602.04879): a token trains while pi - pi_old <= clip_high (A > 0), or
    >= -clip_low (otherwise). verl `compute_policy_loss_dppo_tv`, whose clip_ratio_c is `ratio_cap` (section 5.4)."""
    moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    valid = torch.where(inputs.advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _within(inputs, valid, ratio_cap)


@policy_loss
def dppo_kl(inputs: Inputs, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_cap: float = 20.0) -> PerToken:
    """DPPO, binary KL (arXiv:2602.04879): a token trains while KL(pi_old || pi) of {y_t, not y_t} is in its bound, or
    pi comes back to pi_old. verl `compute_policy_loss_dppo_kl`."""
    now, old = inputs.logprobs.detach(), inputs.old_logprobs
    prob, before = now.exp(), old.exp()
    kl = before * (old - now) + (1 - before) * torch.log((1 - before + 1e-8) / (1 - prob + 1e-8))
    up, down = (kl <= clip_high) | (prob <= before), (kl <= clip_low) | (prob >= before)
    return _within(inputs, torch.where(inputs.advantages > 0, up, down), ratio_cap)


def _within(inputs: Inputs, valid: Tensor, cap: float) -> PerToken:
    ratio = inputs.ratio.detach()
    losses = -inputs.advantages * ratio.clamp(max=cap) * inputs.logprobs * valid
    return PerToken(losses, clipped=~valid, lower=(ratio > cap) & valid)


@policy_loss
def sapo(inputs: Inputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> PerToken:
    """Soft adaptive policy optimisation (arXiv:2511.20347, eq. 5-6): a gate that closes smoothly instead of a clip.

    Always aggregated as seq-mean-token-mean. verl `compute_policy_loss_sapo`; TRL loss_type "sapo" without a bound.
    """
    tau = torch.where(inputs.advantages > 0, tau_pos, tau_neg)
    return PerToken(-inputs.advantages * torch.sigmoid(tau * (inputs.ratio - 1.0)) * (4.0 / tau))


@policy_loss
def clip_cov(inputs: Inputs, *, chosen: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> PerToken:
    """PPO's clip, and no gradient at all at the tokens `chosen` (bool [N], covariance.py): those that would lower the
    entropy most. arXiv:2505.22617, section 4.2; verl `compute_policy_loss_clip_cov`."""
    ratio = inputs.ratio
    limited = -inputs.advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    unlimited = -inputs.advantages * ratio
    out = chosen & ~(limited > unlimited)
    return PerToken(torch.maximum(unlimited, limited) * ~out, clipped=out)


@policy_loss
def kl_cov(inputs: Inputs, *, chosen: Tensor, kl_coef: float = 0.1) -> PerToken:
    """-A r, and a penalty on |log r| at the tokens `chosen` (bool [N], covariance.py).

    arXiv:2505.22617, section 4.3; verl `compute_policy_loss_kl_cov`, whose ppo_kl_coef is `kl_coef`.
    """
    log_ratio = inputs.bounded
    return PerToken(-inputs.advantages * log_ratio.exp() + kl_coef * log_ratio.abs() * chosen, clipped=chosen)


@policy_loss
def dro(inputs: Inputs, *, beta: float = 1.0) -> PerToken:
    """Direct reward optimisation, token by token (arXiv:2405.19107, eq. 4). verl `compute_policy_loss_dro`, which has
    no default for beta."""
    return PerToken(-inputs.advantages * inputs.logprobs + 0.5 * beta * inputs.bounded.square())
