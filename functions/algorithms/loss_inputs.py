"""What all policy losses have in common: their checked inputs, and how a loss per token becomes loss and metrics."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate, token_mean
from functions.algorithms.metrics import Metrics
from functions.algorithms.names import FIXED_AGGREGATION
from functions.algorithms.ragged import checked

LOG_RATIO_BOUND = 20.0
PolicyLoss = Callable[..., tuple[Tensor, Metrics]]


class Inputs:
    """What all losses read, checked; zeros under the mask. Per token [N]; `weights` None: all ones."""

    def __init__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, segment: Tensor, mask: Tensor,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        self.segment, self.mask = segment, mask
        self.logprobs = checked("logprobs", logprobs, segment, mask)
        self.old_logprobs = checked("old_logprobs", old_logprobs.detach(), segment, mask)
        self.advantages = checked("advantages", advantages.detach(), segment, mask)
        self.weights = None if weights is None else checked("weights", weights.detach(), segment, mask)
        self.log_ratio = self.logprobs - self.old_logprobs

    @property
    def bounded(self) -> Tensor:
        """The log-ratios within LOG_RATIO_BOUND; beyond it they have no gradient. [N]"""
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @property
    def ratio(self) -> Tensor:
        """exp(bounded). [N]"""
        return torch.exp(self.bounded)


class PerToken(NamedTuple):
    """What a loss says of each token [N]."""

    losses: Tensor
    clipped: Tensor | None = None
    """bool: counted in actor/pg_clipfrac,"""
    lower: Tensor | None = None
    """in actor/pg_clipfrac_lower,"""
    overflow: Tensor | None = None
    """and in actor/ratio_overflow; None: where the log-ratio is beyond LOG_RATIO_BOUND."""
    bound: float = LOG_RATIO_BOUND
    """Of the log-ratios in actor/ppo_kl."""
    weighed: bool = False
    """`weights` are in the losses already."""


def policy_loss(of: Callable[..., PerToken]) -> PolicyLoss:
    """`of(inputs, **options)` as a loss that takes by keyword what all do (logprobs, old_logprobs, advantages [N],
    segment, mask, totals, aggregation, weights) and the options: weighed, aggregated and counted."""

    @wraps(of)
    def loss(
        *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, segment: Tensor, mask: Tensor, totals: Totals,
        aggregation: str, weights: Tensor | None = None, **options: object,
    ) -> tuple[Tensor, Metrics]:  # fmt: skip
        inputs = Inputs(logprobs, old_logprobs, advantages, segment, mask, weights)
        found = of(inputs, **options)
        losses = found.losses if inputs.weights is None or found.weighed else found.losses * inputs.weights
        mode = FIXED_AGGREGATION.get(of.__name__, aggregation)
        total = aggregate(losses=losses, mask=mask, segment=segment, totals=totals, aggregation=mode)
        overflow = inputs.log_ratio.abs() > LOG_RATIO_BOUND if found.overflow is None else found.overflow

        def fraction(flag: Tensor | None) -> Tensor:
            return token_mean(torch.zeros_like(losses) if flag is None else flag.to(torch.float32), mask, totals)

        return total, {
            "actor/pg_loss": total.detach(),
            "actor/pg_clipfrac": fraction(found.clipped),
            "actor/pg_clipfrac_lower": fraction(found.lower),
            "actor/ppo_kl": token_mean(-inputs.log_ratio.clamp(-found.bound, found.bound), mask, totals),
            "actor/ratio_overflow": fraction(overflow),
        }

    shared = [p for p in inspect.signature(loss, follow_wrapped=False).parameters.values() if p.name != "options"]
    _, *own = inspect.signature(of).parameters.values()
    loss.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]  # what call_with looks at
    return loss
