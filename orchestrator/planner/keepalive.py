"""When to start a function ahead of its use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def prewarm_at_s(first_use_s: float, start_seconds: Sequence[float], *, quantile: float = 0.9) -> float:
    """When to start a function that is first used at `first_use_s`: ahead by a cold start that rarely takes longer."""
    if not len(start_seconds):
        return max(0.0, first_use_s)
    return max(0.0, first_use_s - float(np.quantile(np.asarray(start_seconds, dtype=np.float64), quantile)))
