"""The example's reward: 1 where the last number of a response is the sum that was asked for, 0 elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """verl's signature. `solution_str` is a response such as "07 15 20"."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and int(numbers[-1]) == int(ground_truth))
