"""Decides: which replicas of which function exist when, and who gets which share of the work. Imports no torch.

`from orchestrator import train` runs a job from Python (session/python.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.session.python import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrator.session.python import train  # nobody else waits for what it imports

    return train
