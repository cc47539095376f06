"""What all policy losses have in common: their checked inputs, and how a loss per token becomes loss and metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate, token_mean
from functions.algorithms.metrics import Metrics
from functions.algorithms.ragged import checked

LOG_RATIO_BOUND = 20.0


class Inputs:
    """The checked inputs that all losses share (zeros under the mask), and the end that all share."""

    def __init__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, segment: Tensor, mask: Tensor
    ) -> None:
        self.segment, self.mask = segment, mask
        self.logprobs = checked("logprobs", logprobs, segment, mask)
        self.advantages = checked("advantages", advantages.detach(), segment, mask)
        self.log_ratio = self.logprobs - checked("old_logprobs", old_logprobs.detach(), segment, mask)

    @property
    def bounded(self) -> Tensor:
        """The log-ratios within LOG_RATIO_BOUND; beyond it they have no gradient. [N]"""
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @property
    def ratio(self) -> Tensor:
        """exp(bounded). [N]"""
        return torch.exp(self.bounded)

    def finish(
        self,
        losses: Tensor,
        weights: Tensor | None,
        totals: Totals,
        aggregation: str,
        clipped: Tensor | None = None,
        lower: Tensor | None = None,
        overflow: Tensor | None = None,
        bound: float = LOG_RATIO_BOUND,
    ) -> tuple[Tensor, Metrics]:
        """Weigh, aggregate and count; `bound` is that of the log-ratios in actor/ppo_kl."""
        none = torch.zeros_like(losses, dtype=torch.bool)
        if weights is not None:
            losses = losses * checked("weights", weights.detach(), self.segment, self.mask)
        if overflow is None:
            overflow = self.log_ratio.abs() > LOG_RATIO_BOUND
        loss = aggregate(losses=losses, mask=self.mask, segment=self.segment, totals=totals, aggregation=aggregation)

        def fraction(flag: Tensor | None) -> Tensor:
            return token_mean((none if flag is None else flag).to(torch.float32), self.mask, totals)

        return loss, {
            "actor/pg_loss": loss.detach(),
            "actor/pg_clipfrac": fraction(clipped),
            "actor/pg_clipfrac_lower": fraction(lower),
            "actor/ppo_kl": token_mean(-self.log_ratio.clamp(-bound, bound), self.mask, totals),
            "actor/ratio_overflow": fraction(overflow),
        }
