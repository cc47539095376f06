"""cost.json as columns: what each function cost per step."""

import json
import os
import threading
from collections import OrderedDict
from pathlib import Path

from functions.base.wire import Json
from orchestrator.api.views.thin import parts
from orchestrator.run.ledger import Books, StepCost, read_books

KEPT = 16
"""Runs whose books stay read, and answers that stay made of each."""
NO_BOOKS = Books([], StepCost(0), StepCost(0), 0)
MEASURES = ("usd", "gpu_s", "replica_s", "busy_s")


class BookFiles:
    """cost.json of the runs that were asked for last, read again when it has changed. Thread-safe."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, tuple[tuple[int, int], Books, dict[int | None, str]]] = OrderedDict()
        """Stamp, books, and the columns that were worked out of them, by their number of points."""
        self._lock = threading.Lock()

    def read(self, path: Path) -> Books | None:
        """None where there are no books. Raises RunError."""
        with self._lock:
            try:
                stat = os.stat(path)
            except FileNotFoundError:
                return None
            stamp = (stat.st_ino, stat.st_mtime_ns)
            if path not in self._files or self._files[path][0] != stamp:
                books = read_books(path)
                if books is None:
                    return None
                self._files[path] = (stamp, books, {})
            self._files.move_to_end(path)
            while len(self._files) > KEPT:
                self._files.popitem(last=False)
            return self._files[path][1]

    def columns(self, path: Path, points: int | None) -> str:
        """`cost_columns`, as JSON. Raises RunError."""
        books = self.read(path)
        if books is None:
            return json.dumps(cost_columns(NO_BOOKS, points))
        with self._lock:
            known = self._files[path][2]
            if points not in known:
                if len(known) >= KEPT:
                    known.clear()
                known[points] = json.dumps(cost_columns(books, points))
            return known[points]


def cost_columns(books: Books, points: int | None) -> Json:
    """The CostSteps of models.py: sums over at most `points` runs of steps."""
    runs = parts(len(books.steps), points)
    sums = [sum((books.steps[i] for i in run), StepCost(0)) for run in runs]
    functions = {
        name: {
            measure: [getattr(cost.functions[name], measure) if name in cost.functions else 0.0 for cost in sums]
            for measure in MEASURES
        }
        for name in books.functions
    }
    return {
        "steps": [books.steps[run[-1]].step for run in runs],
        "counts": [len(run) for run in runs],
        "wall_s": [cost.wall_s for cost in sums],
        "functions": functions,
    }
