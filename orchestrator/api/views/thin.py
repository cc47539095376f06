"""Metrics as columns, and many steps as few points."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

KEPT = 16
"""Runs whose names stay known."""

Column = list[float | None]


class Names:
    """Every metric that any row of a run has; of rows that were seen before nothing is looked at again."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Path, tuple[int, set[str]]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
        with self._lock:
            count, found = self._seen.pop(path, (0, set()))
            if count > len(rows):
                count, found = 0, set()
            for row in rows[count:]:
                found.update(row)
            self._seen[path] = (len(rows), found)
            while len(self._seen) > KEPT:
                self._seen.popitem(last=False)
            return sorted(found - {"step"})


def columns(
    rows: Collection[dict[str, Any]], known: Collection[str], *, names: Collection[str], from_step: int,
    to_step: int | None,
) -> tuple[list[int], dict[str, Column]]:  # fmt: skip
    """The steps from `from_step` to `to_step`, and a column per metric that any of them has; None where one lacks it.

    `names` chooses among the metrics that are `known`: exact names, or beginnings that end in `/`; empty: all.
    """
    chosen = [r for r in rows if r["step"] >= from_step and (to_step is None or r["step"] <= to_step)]
    exact, beginnings = set(names), tuple(name for name in names if name.endswith("/"))
    wanted = [name for name in known if not names or name in exact or name.startswith(beginnings)]
    found = {name: [row.get(name) for row in chosen] for name in wanted}
    present = {name: column for name, column in found.items() if any(value is not None for value in column)}
    return [int(row["step"]) for row in chosen], present


def parts(count: int, points: int | None) -> list[range]:
    """`count` rows in at most `points` runs of about the same length (None: one each); the last row is alone."""
    if points is None or count <= points:
        return [range(k, k + 1) for k in range(count)]
    most = max(1, points - 1)
    runs = [range(k * (count - 1) // most, (k + 1) * (count - 1) // most) for k in range(most)]
    return [*runs, range(count - 1, count)] if points > 1 else [range(count)]


def thinned(column: Sequence[float | None], runs: Sequence[range]) -> tuple[Column, Column, Column]:
    """Mean, least and greatest of each run; None where a run has no value."""
    found = [[v for v in column[run.start : run.stop] if v is not None] for run in runs]
    mean: Column = [sum(values) / len(values) if values else None for values in found]
    return mean, [min(values, default=None) for values in found], [max(values, default=None) for values in found]
