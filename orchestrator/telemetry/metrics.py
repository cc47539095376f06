"""Metric names and aggregation, as verl's `verl/trainer/ppo/metric_utils.py` has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """`name`/{mean,max,min}; nothing for no values: a mean of nothing is no number."""
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def length_metrics(name: str, lengths: Iterable[int], limit: int) -> dict[str, float]:
    """`name`/{mean,max,min,clip_ratio} of lengths in tokens; clip_ratio is the share that reached `limit`.

    `name` is `response_length` or `prompt_length` (verl `compute_data_metrics`).
    """
    values = [float(length) for length in lengths]
    clipped = {f"{name}/clip_ratio": sum(value >= limit for value in values) / len(values)} if values else {}
    return distribution(name, values) | clipped
