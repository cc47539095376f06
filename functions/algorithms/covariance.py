"""Which tokens would change the entropy most: covariance of advantage and log-probability (arXiv:2505.22617, eq. 10).

    cov_t = (A_t - mean A) (log pi(y_t) - mean log pi), means over the trained tokens of the batch
Chosen once per step, of the whole batch and by the weights before the step, so that it does not depend on how the batch
is split. verl `core_algos.py:compute_policy_loss_clip_cov` and `compute_policy_loss_kl_cov` choose in each micro-batch,
by its current weights: the same where a step is one micro-batch.
"""

import torch
from torch import Tensor

from functions.algorithms.ragged import checked


def covariances(*, logprobs: Tensor, advantages: Tensor, segment: Tensor, mask: Tensor) -> Tensor:
    """float64 [N], 0 under the mask."""
    logs = checked("logprobs", logprobs.detach(), segment, mask).double()
    gains = checked("advantages", advantages.detach(), segment, mask).double()
    count = mask.sum().clamp(min=1.0)
    return (gains - gains.sum() / count) * (logs - logs.sum() / count) * mask


def largest(covariance: Tensor, mask: Tensor, *, ratio: float) -> Tensor:
    """bool [N]: the largest `ratio` of the trained tokens, at least one where there is any (kl_cov)."""
    chosen = torch.zeros_like(mask, dtype=torch.bool)
    trained = (mask == 1).nonzero()[:, 0]
    if trained.numel():
        count = max(1, int(trained.numel() * ratio))
        chosen[trained[covariance[trained].topk(min(count, trained.numel())).indices]] = True
    return chosen


def random_between(covariance: Tensor, mask: Tensor, *, ratio: float, low: float, high: float, seed: int) -> Tensor:
    """bool [N]: `ratio` of the trained tokens (at least one), drawn from those whose covariance is in (low, high);
    the same for the same `seed` (clip_cov)."""
    inside = ((mask == 1) & (covariance > low) & (covariance < high)).nonzero()[:, 0]
    order = torch.randperm(inside.numel(), generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros_like(mask, dtype=torch.bool)
    chosen[inside[order[: max(1, int(ratio * float(mask.sum())))]]] = True
    return chosen
