"""Statistics over the sequences that answer the same prompt. Whole batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from functions.algorithms.metrics import Metrics
from functions.algorithms.ragged import checked_scores


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Per sequence [S], float64, except the metrics."""

    centered: Tensor
    """Score minus the mean of its group; exactly 0 in a group of one and in a group of equal scores."""
    std: Tensor
    """Standard deviation (n - 1) of its group; 0 in a group of one."""
    size: Tensor
    """Sequences in its group."""
    metrics: Metrics
    """critic/groups, critic/groups_zero_variance (at least two members, all equal), critic/groups_single."""


def group_stats(scores: Tensor, group: Tensor) -> GroupStats:
    """Statistics of `scores` [S] by `group` int64 [S] (any numbers, any order). ValueError for a score not finite."""
    if scores.shape != group.shape:
        raise ValueError(f"group: shape {tuple(group.shape)} must be that of scores {tuple(scores.shape)}")
    exact = checked_scores("scores", scores).double()
    order = torch.argsort(group, stable=True)
    _, inverse, counts = torch.unique(group, return_inverse=True, return_counts=True)

    def reduce(values: Tensor, how: str) -> Tensor:
        if values.numel() == 0:
            return values
        return torch.segment_reduce(values[order], how, lengths=counts)

    size = counts.double()
    equal = reduce(exact, "max") == reduce(exact, "min")
    mean = reduce(exact, "sum") / size
    centered = torch.where(equal[inverse], torch.zeros_like(exact), exact - mean[inverse])
    variance = reduce(centered.square(), "sum") / (size - 1.0).clamp(min=1.0)
    metrics = {
        "critic/groups": torch.tensor(float(counts.numel())),
        "critic/groups_zero_variance": (equal & (counts > 1)).sum().float(),
        "critic/groups_single": (counts == 1).sum().float(),
    }
    return GroupStats(centered=centered, std=variance.sqrt()[inverse], size=size[inverse], metrics=metrics)


def informative_groups(*, scores: Tensor, group: Tensor) -> Tensor:
    """bool [S]: False where all scores of the sequence's group are equal (a group of one included): no gradient there.

    DAPO's dynamic sampling keeps the others and samples more prompts (arXiv:2503.14476, section 3.2). Compare the
    scores before shaping and penalties, as DAPO does with accuracy. Filter with `keep_sequences`.
    """
    return group_stats(scores, group).std > 0
