"""The keys of a job that are paths, or name code in files; made absolute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.job.environment_config import located
from orchestrator.job.hub import HubId

PATHS = (("model", "path"), ("data", "train"), ("data", "validation"), ("critic", "path"), ("reference", "path"),
         ("reward", "model"))  # fmt: skip
"""The keys of a job that are paths."""
CODE = (("", "recipe"), ("reward", "score"), ("environment", "kind"), ("algorithm", "advantage"), ("algorithm", "loss"))
"""The keys that may be `<file.py>:<name>`."""


def resolve(table: dict[str, Any], base: Path) -> None:
    """Makes the paths of a job absolute, in place; `<file.py>:<function>` as well. An id of the Hub stays, unless it is
    a path here."""
    for section, key in PATHS:
        inner = table.get(section)
        value = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(value, str) and (HubId.parse(value) is None or (base / value).exists()):
            path = (base / value).resolve()
            if section != "data" and (path / "run.json").is_file():
                path = path / "model"  # of another run: what it has made
            inner[key] = str(path)  # type: ignore[index]  # a dict: value came out of it
    for section, key in CODE:
        holder = table.get(section) if section else table
        value = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(value, str):
            holder[key] = located(value, base)  # type: ignore[index]  # a dict: value came out of it
        elif isinstance(value, list | tuple):  # reward.score, several
            holder[key] = [located(v, base) if isinstance(v, str) else v for v in value]  # type: ignore[index]
        elif isinstance(value, dict):  # environment.kind, several by name
            holder[key] = {n: located(v, base) if isinstance(v, str) else v for n, v in value.items()}  # type: ignore[index]
