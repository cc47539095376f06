"""From a score per sequence to what the advantages are computed from. Whole batch."""

import torch
from torch import Tensor

from functions.algorithms.ragged import checked_scores, runs, segment_sum


def scale_scores(
    *, scores: Tensor, shift: float = 0.0, scale: float = 1.0, low: float | None = None, high: float | None = None
) -> Tensor:
    """clip(scale * (scores - shift), low, high), [S] to [S]; None leaves a side open.

    `shift` and `scale` are constants of the job, e.g. 1 / the reward model's standard deviation on a calibration set.
    """
    if low is not None and high is not None and low > high:
        raise ValueError(f"reward clipping: low {low} is above high {high}")
    scaled = (checked_scores("scores", scores) - shift) * scale
    return scaled if low is None and high is None else scaled.clamp(min=low, max=high)


def overlong_penalty(*, lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """min(0, -factor * (length - (max_length - buffer)) / buffer), [S]: added to the scores.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): nothing up to max_length - buffer tokens, then linear
    down to -factor at max_length. `lengths` int64 [S] are response tokens. As verl
    `verl/workers/reward_manager/dapo.py`.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer: must lie in (0, max_length = {max_length}], got {buffer}")
    exceeded = (lengths - (max_length - buffer)).to(torch.float32)
    return torch.clamp(-exceeded / buffer * factor, max=0.0)


def token_rewards(
    *, scores: Tensor, segment: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0,
    turn_rewards: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[N]: -kl_coef * kl at every trained token, plus the score at the last trained token of its sequence.

    Of a score part of which was earned in turns (`turn_rewards` [N], at each turn's last token) that part is there, the
    rest at the last. InstructGPT (arXiv:2203.02155). A sequence without trained tokens has nowhere to put its score: it
    is left out here, and counted by `batch_totals`. (verl puts the score at the last token even under the mask.)
    """
    checked_scores("scores", scores)
    rewards = torch.zeros(segment.shape, dtype=torch.float32, device=segment.device)
    trained = mask == 1
    if kl is not None:
        rewards = torch.where(trained, -kl_coef * kl.detach(), rewards)
    found = runs(segment[trained])
    last = trained.nonzero()[:, 0][found.lengths.cumsum(0) - 1]
    rest = scores
    if turn_rewards is not None:
        earned = torch.where(trained, turn_rewards.to(rewards.dtype), torch.zeros_like(rewards))
        rewards += earned
        rest = scores - segment_sum(values=earned, segment=segment, num_sequences=scores.numel())
    rewards[last] += rest[found.ids].to(rewards.dtype)
    return rewards


def penalized_scores(*, scores: Tensor, segment: Tensor, mask: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """[S]: scores - kl_coef * sum of `kl` over the trained tokens: KL in the reward for outcome estimators.

    RLOO (arXiv:2402.14740). The same sum as over `token_rewards`.
    """
    penalty = torch.where(mask == 1, kl.detach(), torch.zeros_like(kl))
    total = segment_sum(values=penalty, segment=segment, num_sequences=scores.numel())
    return checked_scores("scores", scores) - kl_coef * total
