"""Before RL: advantages that make a policy gradient the gradient of learning from responses that a data set gives.

    sft            1: -A log pi, mean over tokens, is the negative log-likelihood
    dpo            2 beta sigmoid(-beta D), minus that for the rejected one: with D the difference of the pair's
                   log(pi / pi_ref), -A log pi summed over tokens and averaged over both has DPO's gradient
    bradley_terry  2 sigmoid(-D), minus that for the rejected one, D the difference of the pair's scores
The gradient is exact at the weights that the advantages were computed with, so for `dpo` and `bradley_terry` a step is
one optimizer step; in return pairs may lie in different packs and on different ranks. The first sample of a group is
chosen, the second rejected. Equal to a step of TRL 1.16 `trl/trainer/sft_trainer.py`, `trl/trainer/dpo_trainer.py`
(loss sigmoid) and `trl/trainer/reward_trainer.py`.
"""

import torch
from torch import Tensor

from functions.algorithms.estimate import Estimate
from functions.algorithms.ragged import checked, per_token, segment_sum


def sft(*, segment: Tensor, mask: Tensor) -> Estimate:
    """1 at each trained token."""
    ones = mask.to(torch.float32)
    return Estimate(ones, ones, {})


def dpo(
    *, old_logprobs: Tensor, reference_logprobs: Tensor, group: Tensor, segment: Tensor, mask: Tensor, beta: float = 0.1
) -> Estimate:
    """Direct preference optimisation (arXiv:2305.18290, eq. 7). Metrics: dpo/loss, dpo/accuracy, dpo/margin."""
    old = checked("old_logprobs", old_logprobs, segment, mask)
    apart = old - checked("reference_logprobs", reference_logprobs, segment, mask)
    return _pairs(beta * _sums(apart, segment, mask, group), group, segment, mask, beta, "dpo")


def bradley_terry(*, old_values: Tensor, group: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """A reward model from pairs (InstructGPT, arXiv:2203.02155, eq. 1); one trained token a sample, where its score is
    read. Metrics: rm/loss, rm/accuracy, rm/margin."""
    scores = _sums(checked("old_values", old_values, segment, mask), segment, mask, group)
    return _pairs(scores, group, segment, mask, 1.0, "rm")


def _sums(values: Tensor, segment: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    return segment_sum(values=values.double() * mask, segment=segment, num_sequences=group.numel())


def _pairs(scores: Tensor, group: Tensor, segment: Tensor, mask: Tensor, beta: float, name: str) -> Estimate:
    numbers, counts = torch.unique(group, return_counts=True)
    if bool((counts != 2).any()):
        odd = int((counts != 2).nonzero()[0, 0])
        raise ValueError(f"group {int(numbers[odd])}: has {int(counts[odd])} samples, a pair has 2: chosen, rejected")
    chosen, rejected = torch.argsort(group, stable=True).view(-1, 2).unbind(1)
    margin = scores[chosen] - scores[rejected]
    pull = 2.0 * beta * torch.sigmoid(-margin)
    advantages = torch.zeros_like(scores)
    advantages[chosen], advantages[rejected] = pull, -pull
    flat = per_token(values=advantages.to(torch.float32), segment=segment) * mask
    metrics = {
        f"{name}/loss": -torch.nn.functional.logsigmoid(margin).mean(),
        f"{name}/accuracy": (margin > 0).double().mean(),
        f"{name}/margin": margin.mean(),
    }
    return Estimate(flat, flat, metrics)
