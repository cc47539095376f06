"""The example's environment: a calculator. Right answers are worth 1, each use of the tool costs 0.1."""

from __future__ import annotations

from typing import Any


class Calculator:
    def reset(self, ground_truth: str, **row: Any) -> None:
        self.truth, self.used = ground_truth, 0

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.used += 1
        return a * b

    def get_reward(self, text: str) -> float:
        return float(text.strip() == self.truth) - 0.1 * self.used
