"""The critic's loss."""

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate, token_mean
from functions.algorithms.metrics import Metrics
from functions.algorithms.ragged import checked


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str = "token-mean",
    clip: float | None = 0.5,
) -> tuple[Tensor, Metrics]:
    """0.5 * aggregate(max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2)); None does not clip. All [N].

    PPO as in OpenAI baselines (arXiv:2005.12729); verl `core_algos.py:compute_value_loss`.
    Metrics: critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean.
    """
    values = checked("values", values, segment, mask)
    returns = checked("returns", returns, segment, mask)
    squares = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        old_values = checked("old_values", old_values, segment, mask)
        limited = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
        clipped = (limited > squares).to(torch.float32)
        squares = torch.maximum(squares, limited)
    loss = 0.5 * aggregate(losses=squares, mask=mask, segment=segment, totals=totals, aggregation=aggregation)
    return loss, {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": token_mean(clipped, mask, totals),
        "critic/vpred_mean": token_mean(values, mask, totals),
    }
