"""PF-PPO: samples are drawn again by their scores, so that the step hears more of those that say much."""

from typing import Literal

import torch
from torch import Tensor

from functions.algorithms.ragged import checked_scores

Method = Literal["pow", "max_min", "max_random"]


def resampling_weights(*, scores: Tensor, method: Method, power: float = 2.0) -> Tensor:
    """float64 [S], above 0: how often each sample is drawn, up to a factor.

    pow |s|^power; max_min 1 for the best and the worst, else 0; max_random 0.4 for the best, 0.1 for all others.
    PF-PPO (arXiv:2409.06957); verl 0.9.1 `core_algos.py:compute_pf_ppo_reweight_data`.
    """
    exact = checked_scores("scores", scores).double()
    best, worst = exact.max(), exact.min()
    match method:
        case "pow":
            weights = exact.abs().pow(power)
        case "max_min":
            weights = ((exact == best) | (exact == worst)).double()
        case "max_random":
            weights = torch.where(exact == best, 0.4, 0.1).double()
    return (weights + 1e-8).clamp(min=1e-8)


def resample(*, scores: Tensor, method: Method, power: float, seed: int) -> Tensor:
    """int64 [S]: which samples take the places of the S samples, drawn with replacement; the same for the same seed."""
    weights = resampling_weights(scores=scores, method=method, power=power)
    return torch.multinomial(weights, scores.numel(), replacement=True, generator=torch.Generator().manual_seed(seed))
