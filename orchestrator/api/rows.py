"""metrics.jsonl as columns: of the runs that were asked for last, only what was appended is parsed again."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import RunError

KEPT = 16
"""Runs whose rows stay parsed."""


@dataclass
class _File:
    inode: int = 0
    offset: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


class MetricRows:
    """Thread-safe."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path) -> list[dict[str, Any]]:
        """One dict per committed step, in order. Raises RunError for a file that holds something else."""
        with self._lock:
            file = self._files.setdefault(path, _File())
            self._files.move_to_end(path)
            while len(self._files) > KEPT:
                self._files.popitem(last=False)
            try:
                stat = os.stat(path)
                if stat.st_ino != file.inode or stat.st_size < file.offset:
                    file.inode, file.offset, file.rows = stat.st_ino, 0, []
                if stat.st_size > file.offset:
                    with path.open("rb") as opened:
                        opened.seek(file.offset)
                        data = opened.read()
                    whole = data[: data.rfind(b"\n") + 1]
                    file.rows = file.rows + [json.loads(line) for line in whole.splitlines()]
                    file.offset += len(whole)
            except FileNotFoundError:
                file.inode, file.offset, file.rows = 0, 0, []
            except (OSError, ValueError) as error:
                raise RunError(f"{path}: cannot be read: {error}") from error
            return file.rows


def columns(
    rows: Collection[dict[str, Any]], *, names: Collection[str], from_step: int, to_step: int | None
) -> tuple[list[int], dict[str, list[float | None]]]:
    """The steps from `from_step` to `to_step`, and a column per metric that any of them has; None where one lacks it.

    `names` chooses metrics: exact names, or beginnings that end in `/` (`actor/`); empty: all.
    """
    chosen = [r for r in rows if r["step"] >= from_step and (to_step is None or r["step"] <= to_step)]
    present = sorted({name for row in chosen for name in row} - {"step"})
    if names:
        exact, beginnings = set(names), tuple(name for name in names if name.endswith("/"))
        present = [name for name in present if name in exact or name.startswith(beginnings)]
    return [int(row["step"]) for row in chosen], {name: [row.get(name) for row in chosen] for name in present}
