"""Advantage estimators. Each takes a whole batch and returns an `Estimate`; whitening and groups need all of it.

    grpo, dr_grpo                 (s - mean of the group) / (std of the group + epsilon), or without the division
    rloo                          s - mean of the *others* in the group
    remax                         return-to-go - score of the greedy response to the same prompt
    reinforce_plus_plus           discounted return-to-go, whitened over the batch
    reinforce_plus_plus_baseline  s - mean of the group, whitened over the batch
    gae                           generalised advantage estimation with a critic, whitened over the batch
    gigpo                         of the episode and of each turn: among those of the group, and those with its anchor
    distillation                  log pi_teacher - log pi_old at each token
in baselines.py opo, gpg, grpo_passk, gdpo, optimal_token_baseline, tir_optimal_token_baseline; in given.py sft, dpo,
bradley_terry.

Scores are [S]; token rewards, values, advantages and returns are [N]. Equal to the functions
`compute_*_advantage*` of verl `verl/trainer/ppo/core_algos.py`, except for a group of one and a group of equal
scores, whose advantage is exactly 0 here (verl: the raw score, and rounding noise over epsilon).
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from functions.algorithms import baselines, given, names
from functions.algorithms.estimate import Estimate, discounted, outcome, sequence_count, whiten
from functions.algorithms.groups import GroupStats, group_stats
from functions.algorithms.ragged import checked, checked_scores, per_token, to_flat, to_padded
from functions.algorithms.turns import turns_of


def grpo(
    *,
    scores: Tensor,
    group: Tensor,
    segment: Tensor,
    mask: Tensor,
    epsilon: float = 1e-6,
    scale: Literal["group", "batch"] = "group",
) -> Estimate:
    """(s - mean of the group) / (std + epsilon) (GRPO, arXiv:2402.03300, section 4.1.2).

    The standard deviation is the sample's (n - 1), of the group or of all scores of the batch (`scale`;
    arXiv:2508.08221, section 4.2). verl `compute_grpo_outcome_advantage`; TRL `trl/trainer/grpo_trainer.py` has epsilon
    1e-4 and scale_rewards.
    """
    stats = group_stats(scores, group)
    std = stats.std if scale == "group" else scores.double().std() if scores.numel() > 1 else torch.zeros(())
    return outcome(stats.centered / (std + epsilon), stats, segment, mask)


def dr_grpo(*, scores: Tensor, group: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """s - mean of the group: Dr.GRPO (arXiv:2503.20783, section 3.2)."""
    stats = group_stats(scores, group)
    return outcome(stats.centered, stats, segment, mask)


def rloo(*, scores: Tensor, group: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """n / (n - 1) * (s - mean of the group) = s - mean of the others (RLOO, arXiv:2402.14740).

    verl `compute_rloo_outcome_advantage`.
    """
    stats = group_stats(scores, group)
    return outcome(stats.centered * stats.size / (stats.size - 1.0).clamp(min=1.0), stats, segment, mask)


def remax(*, rewards: Tensor, baselines: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """sum_{t' >= t} r_t' - baseline, `baselines` [S] being the score of the greedy response (arXiv:2310.10505).

    `rewards` [N] of `token_rewards`. verl `compute_remax_outcome_advantage`.
    """
    rewards = checked("rewards", rewards, segment, mask)
    baseline = per_token(values=checked_scores("baselines", baselines), segment=segment)
    returns = discounted(rewards, segment, mask, 1.0, baselines.numel())
    return Estimate((returns - baseline) * mask, returns, {})


def reinforce_plus_plus(*, rewards: Tensor, segment: Tensor, mask: Tensor, gamma: float = 1.0) -> Estimate:
    """R_t = r_t + gamma R_{t+1} over the trained tokens, whitened over the batch (arXiv:2501.03262).

    verl `compute_reinforce_plus_plus_outcome_advantage`.
    """
    rewards = checked("rewards", rewards, segment, mask)
    returns = discounted(rewards, segment, mask, gamma, sequence_count(segment))
    return Estimate(whiten(values=returns, mask=mask), returns, {})


def reinforce_plus_plus_baseline(*, scores: Tensor, group: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """s - mean of the group, whitened over the tokens of the batch (arXiv:2501.03262, the baseline form).

    verl `compute_reinforce_plus_plus_baseline_outcome_advantage`.
    """
    stats = group_stats(scores, group)
    centered, _, metrics = outcome(stats.centered, stats, segment, mask)
    advantages = whiten(values=centered, mask=mask)
    return Estimate(advantages, advantages, metrics)


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    segment: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool = True,
) -> Estimate:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; returns = A + V before whitening.

    Schulman et al., arXiv:1506.02438, eq. 16; V after the last token is 0; tokens under the mask are stepped over. In
    float64, rounded once. verl `compute_gae_advantage_return`.
    """
    sequences = sequence_count(segment)
    clean_rewards = checked("rewards", rewards, segment, mask)
    clean_values = checked("values", values, segment, mask)
    reward = to_padded(values=clean_rewards.double(), segment=segment, num_sequences=sequences)
    value = to_padded(values=clean_values.double(), segment=segment, num_sequences=sequences)
    trained = to_padded(values=mask, segment=segment, num_sequences=sequences) == 1
    advantages = torch.zeros_like(reward)
    next_value = reward.new_zeros(sequences)
    running = reward.new_zeros(sequences)
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        running = torch.where(trained[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(trained[:, t], value[:, t], next_value)
        advantages[:, t] = running
    flat = to_flat(padded=advantages, segment=segment).to(rewards.dtype) * mask
    return Estimate(whiten(values=flat, mask=mask) if whiten_advantages else flat, flat + clean_values, {})


def gigpo(
    *,
    scores: Tensor,
    turn_rewards: Tensor,
    anchors: Tensor,
    group: Tensor,
    segment: Tensor,
    mask: Tensor,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    divide: bool = True,
    epsilon: float = 1e-6,
) -> Estimate:
    """A = A_episode + step_weight * A_turn on the tokens of a turn (GiGPO, arXiv:2505.10978, eq. 3 to 8).

    A_episode   (s - mean) / (std + epsilon) over all turns of the prompt's group, each with its episode's score
    A_turn      (R - mean) / (std + epsilon) over the turns of the group with the same anchor state;
                R_t = r_t + gamma R_{t+1} over the turns of an episode
    `turn_rewards` [N] are at each turn's last token, and what the score says beyond their sum is at the last turn's;
    `anchors` [N] name the state that a turn begins in, at its first token. `divide` False leaves the deviations out
    (verl-agent's mode mean_norm). verl-agent `gigpo/core_gigpo.py:compute_gigpo_outcome_advantage`, except that equal
    values of a set are exactly 0 here, as is a score without peers.
    """
    turns = turns_of(segment, mask)
    earned = turns.sums(checked("turn_rewards", turn_rewards, segment, mask))
    returns = turns.returns(earned, gamma)
    members = group[turns.sequence]
    states = torch.stack((members, turns.firsts(anchors).to(members.dtype)), 1)
    _, state = torch.unique(states, dim=0, return_inverse=True)
    episode = group_stats(scores[turns.sequence], members)
    step = group_stats(returns, state)

    def normed(stats: GroupStats) -> Tensor:
        return stats.centered / torch.where(stats.size > 1, stats.std + epsilon, 1.0) if divide else stats.centered

    advantages = (normed(episode) + step_weight * normed(step)).to(torch.float32)
    return Estimate(
        turns.spread(advantages), turns.spread(returns.to(torch.float32)), group_stats(scores, group).metrics
    )


def distillation(*, old_logprobs: Tensor, reference_logprobs: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """log pi_teacher(y_t) - log pi_old(y_t) on the student's own samples: minus the reverse KL's k1 estimate per token.

    On-policy distillation (arXiv:2306.13649; Thinking Machines 2025), with loss `importance_sampling` or `vanilla`.
    `reference_logprobs` are the teacher's. verl `verl/trainer/distillation/losses.py`, loss_mode k1 with
    use_policy_gradient.
    """
    teacher = checked("reference_logprobs", reference_logprobs, segment, mask)
    advantages = (teacher - checked("old_logprobs", old_logprobs, segment, mask)).detach()
    return Estimate(advantages, advantages, {})


Estimator = Callable[..., Estimate]
ADVANTAGES: Mapping[str, Estimator] = {
    name: (vars(given) | vars(baselines) | globals())[name] for name in names.ADVANTAGES
}
