"""What the options of estimators, losses and rejection may be. No torch: the orchestrator checks a job with them."""

import math
from collections.abc import Mapping
from typing import Any

ADVANTAGE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "grpo": ("epsilon", "scale"),
    "grpo_passk": ("epsilon",),
    "gdpo": ("epsilon",),
    "reinforce_plus_plus": ("gamma",),
    "gae": ("gamma", "lam", "whiten_advantages"),
    "gigpo": ("gamma", "step_weight", "divide", "epsilon"),
    "optimal_token_baseline": ("zero_tail",),
    "tir_optimal_token_baseline": ("zero_tail",),
    "dpo": ("beta",),
}
"""Of those that have any."""
LOSS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "vanilla": ("clip_low", "clip_high", "dual_clip"),
    "gspo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "dppo_tv": ("clip_low", "clip_high", "ratio_cap"),
    "dppo_kl": ("clip_low", "clip_high", "ratio_cap"),
    "sapo": ("tau_pos", "tau_neg"),
    "vespo": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
    "clip_cov": ("clip_low", "clip_high", "cov_ratio", "cov_low", "cov_high"),
    "kl_cov": ("kl_coef", "cov_ratio"),
    "geo_mean": ("clip_low", "clip_high"),
    "dro": ("beta",),
    "forward_kl_topk": ("least_logprob", "most_loss"),
}
COVARIANCE = {"clip_cov": {"cov_ratio": 2e-4, "cov_low": 1.0, "cov_high": 5.0}, "kl_cov": {"cov_ratio": 2e-4}}
"""Options of losses that say which tokens are `chosen` (covariance.py), and what they are where a job says nothing."""
NON_NEGATIVE, POSITIVE = (0.0, math.inf), (1e-9, math.inf)
RANGES = {
    "epsilon": NON_NEGATIVE, "gamma": (0.0, 1.0), "lam": (0.0, 1.0), "clip_low": NON_NEGATIVE,
    "clip_high": NON_NEGATIVE, "ratio_cap": (1.0, math.inf), "tau_pos": POSITIVE, "tau_neg": POSITIVE,
    "k_pos": NON_NEGATIVE, "k_neg": NON_NEGATIVE, "lambda_pos": NON_NEGATIVE,
    "lambda_neg": NON_NEGATIVE, "kl_coef": NON_NEGATIVE, "cov_ratio": (1e-9, 1.0),
    "cov_low": (-math.inf, math.inf), "cov_high": (-math.inf, math.inf), "beta": POSITIVE, "most_loss": POSITIVE,
    "least_logprob": (-math.inf, 0.0), "step_weight": NON_NEGATIVE,
}  # fmt: skip
SWITCHES = ("whiten_advantages", "zero_tail", "divide")
WORDS = {"scale": ("group", "batch")}
STATISTICS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""What correction.reject may look at."""
Bound = float | tuple[float, float]


def check_options(key: str, name: str, options: Mapping[str, Any], known: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ValueError for an option that `name` does not take, or a value that it cannot be."""
    taken = known.get(name, ())
    for option, value in options.items():
        if option not in taken:
            raise ValueError(f"{key}: {name!r} has no option {option}; it takes {', '.join(taken) or 'none'}")
        if option in SWITCHES:
            if not isinstance(value, bool):
                raise ValueError(f"{key}.{option}: got {value!r}, wants true or false")
        elif option in WORDS:
            if value not in WORDS[option]:
                raise ValueError(f"{key}.{option}: got {value!r}, wants one of {', '.join(WORDS[option])}")
        elif option == "dual_clip":
            if value is not None and not (_number(value) and value > 1):
                raise ValueError(f"{key}.{option}: got {value!r}, wants a number above 1")
        else:
            low, high = RANGES[option]
            if not (_number(value) and low <= value <= high):
                upto = {NON_NEGATIVE: "of at least 0", POSITIVE: "above 0"}.get((low, high), f"in [{low:g}, {high:g}]")
                raise ValueError(f"{key}.{option}: got {value!r}, wants a number {upto}")


def reject_bounds(statistic: str, bound: Any) -> tuple[float, float]:
    """The interval that the statistic has to lie in; k1's is given as ratios. Raises ValueError."""
    if statistic not in STATISTICS:
        raise ValueError(f"reject: statistic {statistic!r} is unknown, must be one of {', '.join(STATISTICS)}")
    pair = tuple(bound) if isinstance(bound, tuple | list) else None
    if not all(map(_number, pair or (bound,))):
        raise ValueError(f"reject: {statistic} wants numbers, got {bound!r}")
    if statistic.endswith("k1"):
        low, high = (1.0 / bound if bound else 0.0, bound) if pair is None else pair if len(pair) == 2 else (0.0, 0.0)
        if not 0 < low <= high:
            raise ValueError(f"reject: {statistic} wants ratios 0 < low <= high, got {bound}")
        return math.log(low), math.log(high)
    if pair is not None or bound <= 0:
        raise ValueError(f"reject: {statistic} wants one number above 0, got {bound}")
    return -math.inf, bound


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
