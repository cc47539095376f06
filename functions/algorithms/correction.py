"""Correction of the mismatch between the engine that sampled and the trainer: weights, rejection, metrics.

With rho_t = pi_train(y_t) / pi_rollout(y_t), from two log-probabilities of the same weights (or of older weights):
    weights, level token      min(rho_t, cap)                              TIS (Yao et al. 2025, off-policy-rl)
    weights, level sequence   min(prod_t rho_t, cap)
    with a floor              rho outside [floor, cap] gives weight 0      IcePop
    normalised                divided by their mean over the batch
    rejection                 tokens or sequences whose divergence is out of bounds leave the mask
Weights carry no gradient. Equal to verl `verl/trainer/ppo/rollout_corr_helper.py`
(`compute_rollout_correction_weights`, `compute_rollout_rejection_mask`, `compute_offpolicy_metrics`).
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, token_mean, trained_lengths
from functions.algorithms.metrics import Metrics
from functions.algorithms.options import Bound, reject_bounds
from functions.algorithms.ragged import Runs, checked, run_sums, runs

LOG_RATIO_BOUND = 20.0


class Correction(NamedTuple):
    """What the policy loss needs: pass `weights` as weights and `mask` as mask."""

    weights: Tensor
    """float32 [N], 0 where the mask was 0; ones for level None."""
    mask: Tensor
    """float32 [N]: the mask without what was rejected."""
    metrics: Metrics


def rollout_correction(
    *,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    kept_mass: Tensor | None = None,
    level: Literal["token", "sequence"] | None = "token",
    cap: float = 2.0,
    floor: float | None = None,
    reject: Mapping[str, Bound] | None = None,
    scale: float = 1.0,
) -> Correction:
    """Weights, mask and metrics for any part of a batch; all per-token arguments [N], `mask` before rejection.

    kept_mass  ln of what top-k and top-p keep of the trainer's distribution [N], where the rollout's log-probabilities
             are of such a part: abs_diff compares like with like, |logprobs - kept_mass - rollout_logprobs|. All else
             is about the ratio to the distribution that was sampled from, as in verl.
    reject   statistic of STATISTICS -> bound. For k1 a pair (low, high) of ratios pi_rollout / pi_train, or one number
             high, which stands for (1/high, high); for k2 and k3 the largest divergence allowed. All must hold.
    scale    multiplies the weights, after their metrics: 1 / `mean_weight` of the whole batch normalises them
    Metrics (rollout_corr/..., shares of the batch's means unless they end in max or min, `totals` of `mask`):
      kl, k3_kl, abs_diff_mean, abs_diff_max, training_ppl, rollout_ppl, training_log_ppl, rollout_log_ppl,
      log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min, ppl_ratio, chi2_token, chi2_seq,
      ratio_overflow; with a level rollout_is_{mean,second_moment,ratio_fraction_high,ratio_fraction_low} of the
      applied and rollout_is_{max,min} of the raw weights; with reject rollout_rs_masked_fraction,
      rollout_rs_seq_masked_fraction, rollout_rs_<statistic>_masked_fraction.
    """
    if totals.tokens == 0:
        raise ValueError("totals: the batch has no trained token; skip the step")
    if level not in ("token", "sequence", None):
        raise ValueError(f"rollout correction: level {level!r} is unknown, must be token, sequence or None")
    if cap <= 0 or (floor is not None and not 0 < floor <= cap):
        raise ValueError(f"rollout correction: wants 0 < floor <= cap, got floor {floor}, cap {cap}")
    trainer = checked("logprobs", logprobs.detach(), segment, mask)
    rollout = checked("rollout_logprobs", rollout_logprobs.detach(), segment, mask)
    found = runs(segment)
    log_ratio = trainer - rollout
    apart = (log_ratio if kept_mass is None else log_ratio - kept_mass).abs()
    metrics = _mismatch(trainer, rollout, apart, mask, found, totals)
    weights = torch.ones_like(mask) * mask
    if level is not None:
        logs = log_ratio if level == "token" else run_sums(log_ratio, found)[found.position]
        weights = _weights(logs, mask, cap, floor)
        metrics |= _weight_metrics(weights, logs, mask, cap, floor, totals)
    kept = mask
    for statistic, bound in (reject or {}).items():
        keep = _keep(statistic, bound, log_ratio, mask, found)
        kept = kept * keep
        metrics[f"rollout_corr/rollout_rs_{statistic}_masked_fraction"] = token_mean(1.0 - keep, mask, totals)
    if reject:
        lost = run_sums(mask - kept, found) > 0
        metrics["rollout_corr/rollout_rs_masked_fraction"] = token_mean(mask - kept, mask, totals)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = lost.sum() / totals.sequences
    return Correction(weights * scale, kept, metrics)


def mean_weight(*, weights: Tensor, segment: Tensor, mask: Tensor, level: Literal["token", "sequence"]) -> float:
    """Of a whole batch: over its trained tokens, or over its sequences; 1 where it is 0.

    verl `compute_rollout_correction_weights`, rollout_is_batch_normalize.
    """
    found = runs(segment)
    lengths = trained_lengths(mask, found)
    sums, there = run_sums(weights * mask, found).double(), lengths > 0
    if level == "token":
        mean = float(sums.sum() / lengths.double().sum().clamp(min=1.0))
    else:
        mean = float((sums[there] / lengths[there]).sum() / there.sum().clamp(min=1))
    return mean if mean > 1e-8 else 1.0


def on_policy(
    *, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, segment: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """float32 [N]: 0 at tokens with A < 0 of a sequence whose mean log(pi_rollout / pi) is above `threshold`, else 1.

    DeepSeek-V3.2 (arXiv:2512.02556, section 3.1: off-policy sequence masking); `logprobs` are those of the weights that
    are trained now. TRL `trl/trainer/grpo_trainer.py:get_off_policy_mask`.
    """
    apart = checked("rollout_logprobs", rollout_logprobs.detach(), segment, mask)
    apart = apart - checked("logprobs", logprobs.detach(), segment, mask)
    found = runs(segment)
    mean = (run_sums(apart, found) / trained_lengths(mask, found).clamp(min=1.0))[found.position]
    return ((advantages >= 0) | (mean <= threshold)).to(mask.dtype)


def effective_sample_size(metrics: Mapping[str, float]) -> float:
    """(E w)^2 / E w^2 in (0, 1], of the combined metrics of a batch: verl's rollout_is_eff_sample_size."""
    moment = metrics["rollout_corr/rollout_is_second_moment"]
    return metrics["rollout_corr/rollout_is_mean"] ** 2 / moment if moment > 0 else 0.0


def _weights(logs: Tensor, mask: Tensor, cap: float, floor: float | None) -> Tensor:
    raw = torch.exp(logs.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) * mask
    if floor is None:
        return raw.clamp(max=cap)
    return torch.where((raw >= floor) & (raw <= cap), raw, torch.zeros_like(raw))


def _weight_metrics(
    weights: Tensor, logs: Tensor, mask: Tensor, cap: float, floor: float | None, totals: Totals
) -> Metrics:
    low = math.log(floor) if floor is not None else -math.log(cap)
    metrics = {
        "rollout_is_mean": token_mean(weights, mask, totals),
        "rollout_is_second_moment": token_mean(weights.square(), mask, totals),
        "rollout_is_ratio_fraction_high": token_mean((logs > math.log(cap)).float(), mask, totals),
        "rollout_is_ratio_fraction_low": token_mean((logs < low).float(), mask, totals),
    }
    raw = torch.exp(logs.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))[mask == 1]
    if raw.numel():
        metrics |= {"rollout_is_max": raw.max(), "rollout_is_min": raw.min()}
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _keep(statistic: str, bound: Bound, log_ratio: Tensor, mask: Tensor, found: Runs) -> Tensor:
    """float32 [N]: 1 where the statistic of the token (or of its sequence) is within its bound."""
    low, high = reject_bounds(statistic, bound)
    kind = statistic[-2:]
    safe = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    value = {"k1": -safe, "k2": 0.5 * safe.square(), "k3": torch.exp(safe) - 1.0 - safe}[kind] * mask
    if statistic.startswith("seq_max"):
        value = torch.segment_reduce(value, "max", lengths=found.lengths)[found.position] if value.numel() else value
    elif statistic.startswith("seq"):
        per_sequence = run_sums(value, found)
        if statistic.startswith("seq_mean"):
            per_sequence = per_sequence / trained_lengths(mask, found).clamp(min=1.0)
        value = per_sequence[found.position]
    return ((value >= low) & (value <= high)).to(torch.float32)


def _mismatch(trainer: Tensor, rollout: Tensor, apart: Tensor, mask: Tensor, found: Runs, totals: Totals) -> Metrics:
    log_ratio = trainer - rollout
    safe = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    lengths = trained_lengths(mask, found)
    there = lengths > 0
    train_mean = run_sums(trainer, found)[there] / lengths[there]
    rollout_mean = run_sums(rollout, found)[there] / lengths[there]
    difference = rollout_mean - train_mean
    log_sum = run_sums(log_ratio, found)[there].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def sequence_mean(values: Tensor) -> Tensor:
        return values.sum() / totals.sequences

    metrics = {
        "kl": token_mean(-log_ratio, mask, totals),
        "k3_kl": token_mean(torch.exp(safe) - safe - 1.0, mask, totals),
        "abs_diff_mean": token_mean(apart, mask, totals),
        "training_ppl": sequence_mean(torch.exp(-train_mean)),
        "rollout_ppl": sequence_mean(torch.exp(-rollout_mean)),
        "training_log_ppl": sequence_mean(-train_mean),
        "rollout_log_ppl": sequence_mean(-rollout_mean),
        "log_ppl_diff": sequence_mean(difference),
        "log_ppl_abs_diff": sequence_mean(difference.abs()),
        "ppl_ratio": sequence_mean(torch.exp(difference)),
        "chi2_token": token_mean(torch.exp(2.0 * safe) - 1.0, mask, totals),
        "chi2_seq": sequence_mean(torch.exp(2.0 * log_sum) - 1.0),
        "ratio_overflow": token_mean((log_ratio.abs() > LOG_RATIO_BOUND).float(), mask, totals),
    }
    if difference.numel():
        metrics |= {
            "abs_diff_max": apart.max(),
            "log_ppl_diff_max": difference.max(),
            "log_ppl_diff_min": difference.min(),
        }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}
