"""Policy losses. With r_t = exp(log pi(y_t) - log pi_old(y_t)) and the advantage A_t, loss per token:

    vanilla              max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A c         PPO, dual clip
    gspo                 the same clip on s_t = sg[(prod_t r_t)^(1/|y|)] * pi(y_t) / sg[pi(y_t)]   no dual clip
    cispo                -sg[clip(r, 1 - low, 1 + high)] * A * log pi(y_t)
    importance_sampling  -A r
and in token_losses.py gpg, dppo_tv, dppo_kl, sapo, clip_cov, kl_cov and dro, in sequence_losses.py vespo and geo_mean,
in distillation.py forward_kl_topk; then aggregated (aggregation.py). All per-token arguments are [N]; `old_logprobs`
and `advantages` carry no gradient. `weights` (Correction.weights) multiply the loss per token. Log-ratios are clamped
to +-20 before exp (GSPO: s to at most exp(10)), as verl does; a clamped token has no gradient and is counted in
actor/ratio_overflow.

Metrics, each a share of the whole batch's token mean (they add over parts):
    actor/pg_loss, actor/pg_clipfrac, actor/pg_clipfrac_lower, actor/ppo_kl = mean(log pi_old - log pi),
    actor/ratio_overflow
"""

import math
from collections.abc import Mapping

import torch

from functions.algorithms import distillation, names, sequence_losses, token_losses
from functions.algorithms.aggregation import trained_lengths
from functions.algorithms.loss_inputs import Inputs, PerToken, PolicyLoss, policy_loss
from functions.algorithms.ragged import run_sums, runs

GSPO_LOG_RATIO_BOUND = 10.0


@policy_loss
def vanilla(
    inputs: Inputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0
) -> PerToken:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7).

    clip_high above clip_low is DAPO's clip-higher (arXiv:2503.14476, section 3.1). `dual_clip` c > 1 bounds the loss
    by -A c where A < 0 (arXiv:1912.09729); None turns it off. verl `core_algos.py:compute_policy_loss_vanilla`.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip: must be above 1 (or None to turn it off), got {dual_clip}")
    ratio = inputs.ratio
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    lower = torch.zeros_like(losses, dtype=torch.bool)
    if dual_clip is not None:
        bound = -inputs.advantages * dual_clip
        lower = (losses > bound) & (inputs.advantages < 0)
        losses = torch.where(inputs.advantages < 0, torch.minimum(bound, losses), losses)
    return PerToken(losses, clipped=clipped > unclipped, lower=lower)


@policy_loss
def gspo(inputs: Inputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PerToken:
    """Group sequence policy optimisation, the token form (arXiv:2507.18071, section 4.3; clip range: section 5.1).

    The sequence ratio is the geometric mean over the trained tokens. Always aggregated as seq-mean-token-mean, whatever
    `aggregation` says. verl `core_algos.py:compute_policy_loss_gspo`.
    """
    found = runs(inputs.segment)
    sequence_log_ratio = run_sums(inputs.log_ratio, found) / trained_lengths(inputs.mask, found).clamp(min=1.0)
    log_ratio = inputs.logprobs - inputs.logprobs.detach() + sequence_log_ratio[found.position]
    ratio = torch.exp(log_ratio.clamp(max=GSPO_LOG_RATIO_BOUND))
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    losses, overflow = torch.maximum(unclipped, clipped), log_ratio > GSPO_LOG_RATIO_BOUND
    return PerToken(losses, clipped=clipped > unclipped, overflow=overflow, bound=math.inf)


@policy_loss
def cispo(inputs: Inputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> PerToken:
    """Clipped importance weights, no token loses its gradient (MiniMax-M1, arXiv:2506.13585, eq. 4-5).

    The defaults have no lower bound and cap the ratio at 5 (ScaleRL, arXiv:2510.13786; TRL's epsilon_high counts from
    0: its 5.0 is clip_high 4.0). verl `core_algos.py:compute_policy_loss_cispo`.
    """
    ratio = inputs.ratio.detach()
    capped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return PerToken(-capped * inputs.advantages * inputs.logprobs, clipped=ratio != capped)


@policy_loss
def importance_sampling(inputs: Inputs) -> PerToken:
    """-A r, no clip: REINFORCE when pi_old is pi, and the loss of on-policy distillation.

    With `advantages.distillation` its gradient is that of the reverse KL to the teacher, per token
    (Thinking Machines, On-Policy Distillation, 2025; GKD, arXiv:2306.13649).
    """
    return PerToken(-inputs.advantages * inputs.ratio)


_ALL = vars(token_losses) | vars(sequence_losses) | vars(distillation) | globals()
POLICY_LOSSES: Mapping[str, PolicyLoss] = {name: _ALL[name] for name in names.POLICY_LOSSES}
