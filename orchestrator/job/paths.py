"""The keys of a job that are paths, or name code in files; made absolute."""

from pathlib import Path
from typing import Any

from orchestrator.job.environment_config import SCHEMES
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
        if not isinstance(inner, dict) or not isinstance(value := inner.get(key), str):
            continue
        if HubId.parse(value) is None or (base / value).exists():
            path = (base / value).resolve()
            if section != "data" and (path / "run.json").is_file():
                path = path / "model"  # of another run: what it has made
            inner[key] = str(path)
    for section, key in CODE:
        holder = table.get(section) if section else table
        if isinstance(holder, dict) and key in holder:
            holder[key] = _located(holder[key], base)


def _located(value: Any, base: Path) -> Any:
    """With the absolute path of `<file.py>:<name>`; of several (reward.score) and of several by name (environment.kind)
    of each."""
    if isinstance(value, list | tuple):
        return [_located(one, base) for one in value]
    if isinstance(value, dict):
        return {name: _located(one, base) for name, one in value.items()}
    if not isinstance(value, str) or ".py:" not in value or "://" in value or value.startswith(SCHEMES):
        return value
    file, _, name = value.rpartition(":")
    return f"{(base / file).resolve()}:{name}"
