"""The functions that a job may have, and what each does."""

from __future__ import annotations

CRITICS = ("critic", "cost-critic")
