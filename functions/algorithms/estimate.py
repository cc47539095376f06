"""What every advantage estimator returns, and what several of them share."""

from typing import NamedTuple

import torch
from torch import Tensor

from functions.algorithms.groups import GroupStats
from functions.algorithms.metrics import Metrics
from functions.algorithms.ragged import per_token, to_flat, to_padded


class Estimate(NamedTuple):
    """What an estimator returns."""

    advantages: Tensor
    """float32 [N], 0 where the mask is 0."""
    returns: Tensor
    """float32 [N], 0 where the mask is 0: the critic's target, or what was estimated from."""
    metrics: Metrics


def outcome(advantages: Tensor, stats: GroupStats, segment: Tensor, mask: Tensor) -> Estimate:
    """One advantage per sequence ([S] float64) on each of its trained tokens."""
    flat = per_token(values=advantages.to(torch.float32), segment=segment) * mask
    return Estimate(flat, flat, stats.metrics)


def sequence_count(segment: Tensor) -> int:
    return int(segment.max()) + 1 if segment.numel() else 0


def discounted(rewards: Tensor, segment: Tensor, mask: Tensor, gamma: float, sequences: int) -> Tensor:
    """[N]: discounted return-to-go over trained tokens, 0 under the mask; added up in float64."""
    reward = to_padded(values=rewards.double(), segment=segment, num_sequences=sequences)
    trained = to_padded(values=mask, segment=segment, num_sequences=sequences) == 1
    returns = torch.zeros_like(reward)
    running = reward.new_zeros(sequences)
    for t in reversed(range(reward.shape[1])):
        running = torch.where(trained[:, t], reward[:, t] + gamma * running, running)
        returns[:, t] = running
    return to_flat(padded=returns, segment=segment).to(rewards.dtype) * mask


def whiten(*, values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the trained tokens [N], 0 elsewhere; var with n - 1.

    `shift_mean=False` adds the mean back. verl `verl/utils/torch_functional.py:masked_whiten`. ValueError for fewer
    than two trained tokens, as there.
    """
    trained = mask == 1
    count = int(trained.sum())
    if count < 2:
        raise ValueError(f"whitening: needs at least two trained tokens in the batch, got {count}")
    kept = values[trained].double()
    mean, variance = kept.mean(), kept.var()
    whitened = (values.double() - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(trained, whitened, torch.zeros_like(whitened)).to(values.dtype)
