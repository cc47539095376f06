"""From a loss per token to one number, with denominators of the *whole* batch, so that parts of it add up.

    token-mean               sum_i sum_t l_it / (tokens of the batch)            DAPO, arXiv:2503.14476, eq. 12
    token-sum                sum_i sum_t l_it
    seq-mean-token-mean      sum_i (mean_t l_it) / sequences                     GRPO, arXiv:2402.03300, eq. 3
    seq-mean-token-sum       sum_i (sum_t l_it) / sequences
    seq-mean-token-sum-norm  sum_i (sum_t l_it) / sequences / norm               Dr.GRPO, arXiv:2503.20783

Values equal verl `verl/trainer/ppo/core_algos.py:agg_loss`. A sequence that has no trained token is in no denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from functions.algorithms.names import AGGREGATIONS
from functions.algorithms.ragged import Runs, is_trained, run_sums, runs


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Denominators of a whole batch. Those of its disjoint parts (ranks) add up with `+`."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with at least one trained token."""
    empty: int = 0
    """Sequences without: empty responses, and samples whose mask is 0 throughout."""
    norm: float | None = None
    """Constant of seq-mean-token-sum-norm, e.g. the longest response allowed, in tokens."""

    def __add__(self, other: Totals) -> Totals:
        if self.norm != other.norm:
            raise ValueError(f"totals: parts of one batch must share norm, got {self.norm} and {other.norm}")
        return Totals(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            empty=self.empty + other.empty,
            norm=self.norm,
        )


def batch_totals(*, mask: Tensor, segment: Tensor, num_sequences: int, norm: float | None = None) -> Totals:
    """Count what `mask` [N] trains in a batch of `num_sequences` sequences."""
    found = runs(segment)
    trained = trained_lengths(mask, found)
    with_tokens = int((trained > 0).sum())
    if with_tokens > num_sequences:
        raise ValueError(f"num_sequences: {num_sequences}, but segment holds {with_tokens} trained sequences")
    return Totals(tokens=int(trained.sum()), sequences=with_tokens, empty=num_sequences - with_tokens, norm=norm)


def trained_lengths(mask: Tensor, found: Runs) -> Tensor:
    """float32 [R]: trained tokens of each run."""
    return run_sums(is_trained(mask).to(torch.float32), found)


def aggregate(*, losses: Tensor, mask: Tensor, segment: Tensor, totals: Totals, aggregation: str) -> Tensor:
    """Scalar: `losses` [N] of any part of the batch, aggregated as the table above says; parts add up to the whole.

    ValueError when the batch has no trained token (every mode but token-sum would be 0/0).
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation: {aggregation!r} is unknown, must be one of {', '.join(AGGREGATIONS)}")
    if totals.tokens == 0:
        raise ValueError("totals: the batch has no trained token; skip the step")
    kept = torch.where(is_trained(mask), losses, torch.zeros_like(losses))
    match aggregation:
        case "token-mean":
            return kept.sum() / totals.tokens
        case "token-sum":
            return kept.sum()
        case "seq-mean-token-mean":
            found = runs(segment)
            return (kept / trained_lengths(mask, found).clamp(min=1.0)[found.position]).sum() / totals.sequences
        case "seq-mean-token-sum":
            return kept.sum() / totals.sequences
    if totals.norm is None or totals.norm <= 0:
        raise ValueError(f"totals: norm is {totals.norm}; seq-mean-token-sum-norm needs one above 0")
    return kept.sum() / totals.sequences / totals.norm


def denominator(totals: Totals, aggregation: str) -> float:
    """What `aggregate` divides by that depends on the batch: with `Totals(tokens=1, sequences=1)` it gives this times
    what it gives with `totals`."""
    if aggregation == "token-sum":
        return 1.0
    return float(totals.tokens if aggregation == "token-mean" else totals.sequences)


def token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Detached scalar for metrics: sum of `values` [N] at trained tokens over the tokens of the whole batch."""
    kept = torch.where(mask == 1, values.detach(), torch.zeros_like(values))
    return kept.sum() / totals.tokens
