"""The one number by which a job is followed: its reward; where responses are given and nothing is scored, its loss."""

from collections.abc import Iterable

HEADLINES = {
    "critic/score/mean": "reward", "sft/loss": "loss", "dpo/loss": "loss", "rm/loss": "loss", "actor/pg_loss": "loss",
}  # fmt: skip
"""And the word for it; of these the first that a step's metrics have."""


def headline(names: Iterable[str]) -> str | None:
    """Its name; None before the first training step."""
    known = set(names)
    return next((name for name in HEADLINES if name in known), None)
