"""Further advantage estimators: other baselines for the samples of a prompt. See advantages.py.

    opo                         s - mean of the group, each response weighing as much as it is long
    gpg                         (s - mean of the group) * S / (scores that are not 0)
    grpo_passk                  the best of the group: (best - second best) / (std + epsilon); all others 0
    gdpo                        grpo of each reward by itself, their weighted sum, whitened over the batch
    optimal_token_baseline      return-to-go - B_t, with B_t = sum_i G_it W_it / sum_i W_it over the group
    tir_optimal_token_baseline  the same where responses are aligned by their trained tokens (tool output left out)

Equal to the functions of these names in verl 0.9.1 `verl/trainer/ppo/core_algos.py`; a group of one has advantage 0
(verl: its raw score; grpo_passk refuses it), and so has a group of equal scores where the scores are compared.
"""

import torch
from torch import Tensor

from functions.algorithms.estimate import Estimate, discounted, outcome, sequence_count, whiten
from functions.algorithms.groups import group_stats
from functions.algorithms.ragged import checked, segment_sum, to_flat, to_padded


def opo(*, scores: Tensor, group: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """s - sum(length * s) / sum(length) over the group: the optimal baseline where a gradient's size grows with length.

    OPO (arXiv:2505.23585, section 3); lengths in trained tokens. verl `compute_opo_outcome_advantage`.
    """
    stats = group_stats(scores, group)
    lengths = segment_sum(values=mask.double(), segment=segment, num_sequences=scores.numel())
    weighted = _group_sums(stats.centered * lengths, group) / _group_sums(lengths, group).clamp(min=1.0)
    return outcome(stats.centered - weighted, stats, segment, mask)


def gpg(*, scores: Tensor, group: Tensor, segment: Tensor, mask: Tensor) -> Estimate:
    """(s - mean of the group) * S / (scores other than 0), S sequences in the batch.

    GPG (arXiv:2504.02546, section 3.2: groups that are solved by none weaken the gradient). verl
    `compute_gpg_outcome_advantage`.
    """
    stats = group_stats(scores, group)
    alpha = scores.numel() / torch.count_nonzero(scores).clamp(min=1)
    return outcome(stats.centered * alpha, stats, segment, mask)


def grpo_passk(*, scores: Tensor, group: Tensor, segment: Tensor, mask: Tensor, epsilon: float = 1e-6) -> Estimate:
    """(best - second best) / (std of the group + epsilon) for the best of each group, 0 for all others.

    Pass@k training (arXiv:2503.19595). verl `compute_grpo_passk_outcome_advantage`.
    """
    stats = group_stats(scores, group)
    advantages = torch.zeros_like(stats.centered)
    for number in torch.unique(group).tolist():
        rows = (group == number).nonzero()[:, 0]
        if rows.numel() > 1:
            best, at = stats.centered[rows].topk(2)
            advantages[rows[at[0]]] = (best[0] - best[1]) / (stats.std[rows[0]] + epsilon)
    return outcome(advantages, stats, segment, mask)


def gdpo(
    *,
    components: Tensor,
    component_weights: Tensor,
    group: Tensor,
    segment: Tensor,
    mask: Tensor,
    epsilon: float = 1e-6,
) -> Estimate:
    """whiten(sum_k w_k * grpo(reward k)): no reward drowns another whose spread is smaller (arXiv:2601.05242).

    components [S, K]   the rewards of each sequence (algorithm.score.weights names them)
    component_weights [K]
    verl `compute_gdpo_outcome_advantage`.
    """
    total = torch.zeros(components.shape[0], dtype=torch.float64)
    for k in range(components.shape[1]):
        stats = group_stats(components[:, k], group)
        total += float(component_weights[k]) * stats.centered / (stats.std + epsilon)
    flat, _, metrics = outcome(total, stats, segment, mask)
    advantages = whiten(values=flat, mask=mask)
    return Estimate(advantages, advantages, metrics)


def optimal_token_baseline(
    *,
    rewards: Tensor,
    old_logprobs: Tensor,
    squared_mass: Tensor,
    group: Tensor,
    segment: Tensor,
    mask: Tensor,
    correction_weights: Tensor | None = None,
    zero_tail: bool = True,
) -> Estimate:
    """G_t - B_t, B_t = sum_i G_it W_it / sum_i W_it over the group's responses at position t.

    G_t is the return-to-go, W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_v^2) over trained tokens, a proxy of the squared
    norm of the score up to t. squared_mass [N] is sum_v pi_v^2 of the policy before the step; `correction_weights` [N]
    multiply each term of W squared. zero_tail: where only the group's longest response goes on, the baseline is 0.
    verl `compute_optimal_token_baseline_advantage`.
    """
    return _token_baseline(
        rewards, old_logprobs, squared_mass, group, segment, mask, correction_weights, zero_tail, trained_only=False
    )


def tir_optimal_token_baseline(
    *,
    rewards: Tensor,
    old_logprobs: Tensor,
    squared_mass: Tensor,
    group: Tensor,
    segment: Tensor,
    mask: Tensor,
    correction_weights: Tensor | None = None,
    zero_tail: bool = True,
) -> Estimate:
    """`optimal_token_baseline` with position t counted in trained tokens: for responses with tool output in them.

    verl `compute_multi_turn_optimal_token_baseline_advantage`.
    """
    return _token_baseline(
        rewards, old_logprobs, squared_mass, group, segment, mask, correction_weights, zero_tail, trained_only=True
    )


def _token_baseline(
    rewards: Tensor,
    old_logprobs: Tensor,
    squared_mass: Tensor,
    group: Tensor,
    segment: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    zero_tail: bool,
    *,
    trained_only: bool,
) -> Estimate:
    sequences = max(sequence_count(segment), group.numel())
    rewards = checked("rewards", rewards, segment, mask)
    returns = discounted(rewards, segment, mask, 1.0, sequences)
    energy = 1.0 - 2.0 * checked("old_logprobs", old_logprobs, segment, mask).double().exp()
    energy = (energy + checked("squared_mass", squared_mass, segment, mask).double()) * mask
    if weights is not None:
        energy = energy * checked("correction_weights", weights, segment, mask).double().square()
    inside = mask == 1 if trained_only else torch.ones_like(mask, dtype=torch.bool)
    own = segment[inside]

    def rows(values: Tensor) -> Tensor:
        return to_padded(values=values[inside].double(), segment=own, num_sequences=sequences)

    trained, gain, path = rows(mask), rows(returns), rows(energy).cumsum(-1)
    baseline = torch.zeros_like(gain)
    stats = group_stats(segment_sum(values=rewards, segment=segment, num_sequences=sequences)[: group.numel()], group)
    lengths = trained.sum(-1).long()
    for number in torch.unique(group).tolist():
        members = (group == number).nonzero()[:, 0]
        if trained_only:
            members = members[lengths[members] > 0]
        if members.numel() < 2:
            baseline[members] = gain[members]
            continue
        mass = path[members] * trained[members]
        baseline[members] = (gain[members] * mass).sum(0) / (mass.sum(0) + 1e-8)
        second, longest = lengths[members].sort().values[-2:].tolist()
        if zero_tail and longest > second:
            baseline[members[lengths[members].argmax()], second:] = 0.0
    advantages = torch.zeros_like(rewards)
    advantages[inside] = to_flat(padded=(gain - baseline), segment=own).to(rewards.dtype)
    return Estimate(advantages * mask, returns, stats.metrics)


def _group_sums(values: Tensor, group: Tensor) -> Tensor:
    """[S]: the sum of `values` [S] over the group of each."""
    _, inverse = torch.unique(group, return_inverse=True)
    sums = values.new_zeros(int(inverse.max()) + 1 if inverse.numel() else 0)
    return sums.index_add_(0, inverse, values)[inverse]
