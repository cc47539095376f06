"""The entropy bonus."""

from __future__ import annotations

from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate
from functions.algorithms.metrics import Metrics
from functions.algorithms.ragged import checked


def entropy_loss(
    *, entropy: Tensor, segment: Tensor, mask: Tensor, totals: Totals, aggregation: str, coef: float
) -> tuple[Tensor, Metrics]:
    """-coef * aggregate(entropy [N]): added to the policy loss, it pays for entropy (A3C, arXiv:1602.01783).

    Metric: actor/entropy, without the coefficient (also with coef 0, where no gradient flows).
    """
    clean = checked("entropy", entropy if coef != 0 else entropy.detach(), segment, mask)
    mean = aggregate(losses=clean, mask=mask, segment=segment, totals=totals, aggregation=aggregation)
    return -coef * mean, {"actor/entropy": mean.detach()}
