"""Metrics that survive being split: parts add up, except names that end in max or min."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from functions.algorithms.aggregation import Totals, denominator
from functions.algorithms.ragged import checked, checked_scores, segment_sum

Metrics = dict[str, Tensor]
AGGREGATED = ("actor/pg_loss", "sft/loss", "actor/kl_loss", "actor/entropy", "critic/vf_loss")
"""Metrics that are aggregated as the loss is (aggregation.py),"""
SEQUENCE_MEANS = tuple(
    f"rollout_corr/{name}"
    for name in (
        "training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff",
        "ppl_ratio", "chi2_seq", "rollout_rs_seq_masked_fraction",
    )
)  # fmt: skip
"""and those that are means over sequences. All others are means over tokens, or end in max or min."""


def averaged(sums: Mapping[str, float], totals: Totals, aggregation: str) -> dict[str, float]:
    """The metrics of a batch from those that were made with `Totals(tokens=1, sequences=1)`, when the denominators
    were not known yet (functions/train/streamed.py)."""

    def divisor(name: str) -> float:
        if name.endswith(("max", "min")):
            return 1.0
        if name in AGGREGATED:
            return denominator(totals, aggregation)
        return float(totals.sequences if name in SEQUENCE_MEANS else totals.tokens)

    return {name: value / divisor(name) for name, value in sums.items()}


def combine_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Metrics of the whole batch from those of its micro-batches, packs or ranks.

    A name that ends in `max` or `min` combines by max or min; every other one is a share of the batch's value (the
    denominator was the batch's) and is added. A part may lack a name: it has no share in it.
    """
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            number = float(value)
            if name not in whole:
                whole[name] = number
            elif name.endswith("max"):
                whole[name] = max(whole[name], number)
            elif name.endswith("min"):
                whole[name] = min(whole[name], number)
            else:
                whole[name] += number
    return whole


def batch_metrics(
    *,
    scores: Tensor | None,
    mask: Tensor,
    segment: Tensor,
    advantages: Tensor,
    returns: Tensor,
    rewards: Tensor | None = None,
    values: Tensor | None = None,
) -> dict[str, float]:
    """critic/{score,advantages,returns,rewards,values}/{mean,max,min} of a whole batch, and critic/vf_explained_var.

    scores [S], None: nothing was scored; the others [N]. `rewards` are summed per sequence. As verl
    `verl/trainer/ppo/metric_utils.py:compute_data_metrics`, with
    vf_explained_var = 1 - var(returns - values) / var(returns).
    """
    trained = mask == 1
    groups = dict[str, Tensor]() if scores is None else {"score": checked_scores("scores", scores)}
    for name, tensor in (("advantages", advantages), ("returns", returns), ("values", values)):
        if tensor is not None:
            groups[name] = checked(name, tensor, segment, mask)[trained]
    if rewards is not None and scores is not None:
        clean = checked("rewards", rewards, segment, mask)
        groups["rewards"] = segment_sum(values=clean, segment=segment, num_sequences=scores.numel())
    metrics: dict[str, float] = {}
    for name, tensor in groups.items():
        if tensor.numel():
            metrics[f"critic/{name}/mean"] = float(tensor.double().mean())
            metrics[f"critic/{name}/max"] = float(tensor.max())
            metrics[f"critic/{name}/min"] = float(tensor.min())
    if values is not None and groups["returns"].numel() > 1:
        spread = float(groups["returns"].double().var())
        error = float((groups["returns"].double() - groups["values"].double()).var())
        if spread > 0:
            metrics["critic/vf_explained_var"] = 1.0 - error / spread
    return metrics
