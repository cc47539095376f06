"""An estimator or a loss by its name, or the user's own by `path/to/file.py:function` (docs/algorithms.md)."""

from collections.abc import Callable, Mapping
from typing import Any

from functions.call import userfile


def named(name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """One of `known`, or what the user's file has. Raises FatalError in one line."""
    found: Callable[..., Any] = userfile.load(name) if ":" in name else known[name]
    return found
