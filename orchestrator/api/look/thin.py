"""Metrics as columns, and many steps as few points."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

Column = list[float | None]


def names_of(rows: Collection[dict[str, Any]]) -> list[str]:
    """Every metric that any row has."""
    found: set[str] = set()
    for row in rows:
        found.update(row)
    return sorted(found - {"step"})


def columns(
    rows: Collection[dict[str, Any]], *, names: Collection[str], from_step: int, to_step: int | None
) -> tuple[list[int], dict[str, Column]]:
    """The steps from `from_step` to `to_step`, and a column per metric that any of them has; None where one lacks it.

    `names` chooses metrics: exact names, or beginnings that end in `/` (`actor/`); empty: all.
    """
    chosen = [r for r in rows if r["step"] >= from_step and (to_step is None or r["step"] <= to_step)]
    present = names_of(chosen)
    if names:
        exact, beginnings = set(names), tuple(name for name in names if name.endswith("/"))
        present = [name for name in present if name in exact or name.startswith(beginnings)]
    return [int(row["step"]) for row in chosen], {name: [row.get(name) for row in chosen] for name in present}


def parts(count: int, points: int | None) -> list[range]:
    """`count` rows in at most `points` runs of about the same length (None: one each)."""
    most = count if points is None else min(count, points)
    return [range(k * count // most, (k + 1) * count // most) for k in range(most)]


def thinned(column: Sequence[float | None], runs: Sequence[range]) -> tuple[Column, Column, Column]:
    """Mean, least and greatest of each run; None where a run has no value."""
    found = [[v for v in column[run.start : run.stop] if v is not None] for run in runs]
    mean: Column = [sum(values) / len(values) if values else None for values in found]
    return mean, [min(values, default=None) for values in found], [max(values, default=None) for values in found]
