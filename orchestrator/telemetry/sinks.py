"""Where metrics go, one line or one set of scalars a step: files of the run directory, and what others run.

The journal is the truth: a sink is opened with all committed steps and brings its files in line with them, so that a
job that was killed at any moment and resumed leaves the same lines as one that was not.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from functions.base.wire import Json
from orchestrator.base.files import Lines, write_atomically
from orchestrator.job.config import JobConfig

Metrics = Mapping[str, float]
Committed = Sequence[tuple[int, Metrics]]
"""(step, metrics) of all committed steps, in order."""
TOLD = ("name", "recipe", "steps", "seed", "deterministic", "model", "data", "rollout", "validation", "algorithm",
        "recipe_options", "train", "critic", "planner")  # fmt: skip
"""Sections of a job that are hyperparameters."""


class Sink(Protocol):
    def write(self, step: int, metrics: Metrics) -> None:
        """One step's metrics; on disk when it returns. Raises RunError where they cannot be written."""

    def close(self, *, failed: bool) -> None:
        """`failed`: the job has ended before its last step."""


class JsonLines:
    """`metrics.jsonl`: `{"step": 3, "actor/pg_loss": 0.1, ...}` a line, names sorted; appended in one write."""

    def __init__(self, path: Path, committed: Committed) -> None:
        whole = b"".join(_line(step, metrics) for step, metrics in committed)
        write_atomically(path, whole)
        self._lines = Lines(path, len(whole))

    def write(self, step: int, metrics: Metrics) -> None:
        self._lines.append(_line(step, metrics))

    def close(self, *, failed: bool) -> None:
        self._lines.close()


def run_id(directory: Path) -> str:
    """What a run is called where runs of everybody meet: random, and the run directory's own from then on."""
    path = directory / "run-id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text().strip()


def hyperparameters(job: JobConfig) -> Json:
    """What of a job is told to others: nothing that may hold a URL with credentials, or says where things run."""
    return job.model_dump(mode="json", include=set(TOLD), exclude_none=True)


def _line(step: int, metrics: Metrics) -> bytes:
    return json.dumps({"step": step, **dict(sorted(metrics.items()))}, allow_nan=False).encode() + b"\n"
