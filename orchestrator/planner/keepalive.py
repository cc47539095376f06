"""Keep a function's replicas over an idle time, or let them go and start them again; and when to start ahead.

Ski rental (Karlin et al., Competitive snoopy caching, 1988): keeping costs its idle seconds, letting go costs a cold
start. Keeping for as long as one cold start takes is never worse than twice the best; when idle times were seen before,
the time to keep that is best for their distribution is better than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def keep_for_s(idle_s: Sequence[float], start_s: float) -> float:
    """Seconds to keep an idle replica before it is let go.

    minimise over t in {0, each idle time seen}  mean(min(idle, t) + start_s [idle > t]);  no history: t = start_s.
    A tie goes to the shorter time.
    """
    if start_s < 0:
        raise ValueError(f"start_s is {start_s} (wants >= 0)")
    if not len(idle_s):
        return start_s
    seen = np.sort(np.asarray(idle_s, dtype=np.float64))
    waits = np.concatenate(([0.0], seen))
    # A wait equal to the idle time itself avoids the start.
    costs = np.minimum(seen[None, :], waits[:, None]).mean(axis=1) + start_s * (seen[None, :] > waits[:, None]).mean(1)
    return float(waits[int(np.argmin(costs))])


def keep(expected_idle_s: float, history_s: Sequence[float], start_s: float, lease_left_s: float | None = None) -> bool:
    """Whether to hold a function from the end of its work in this step to its next use, an all-or-nothing choice.

    True when the idle time expected is one that the best waiting time outlasts. Never when the lease ends before it.
    """
    if lease_left_s is not None and expected_idle_s >= lease_left_s:
        return False
    return expected_idle_s < start_s and expected_idle_s <= keep_for_s(history_s, start_s)


def prewarm_at_s(first_use_s: float, start_seconds: Sequence[float], *, quantile: float = 0.9) -> float:
    """When to start a function that is first used at `first_use_s`: ahead by a cold start that rarely takes longer."""
    if not len(start_seconds):
        return max(0.0, first_use_s)
    return max(0.0, first_use_s - float(np.quantile(np.asarray(start_seconds, dtype=np.float64), quantile)))
