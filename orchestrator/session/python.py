"""A job from Python: what `rlhf-orchestrate run` does, for scripts and notebooks.

from orchestrator import train

def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)

if __name__ == "__main__":                         # functions import this file for `score`
    model = train({
        "name": "first", "steps": 20, "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "data": {"train": "train.jsonl"}, "reward": {"score": score},
    })
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestrator.base.errors import ConfigError, DataError
from orchestrator.job.config import JobConfig, apply_override, load_job, parse_job
from orchestrator.job.paths import CODE
from orchestrator.recipes.base import Recipe
from orchestrator.run.directory import RunDirectory
from orchestrator.session import session
from orchestrator.session.view import NoView, View


def train(
    job: Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    view: View | None = None,
) -> Path:
    """Runs a job to its end and returns the directory of its model; all that it leaves is in its run directory.

    job: a job file, or what one says as a dict (paths relative to the working directory). In a dict, `recipe`,
    `reward.score`, `algorithm.loss` and `algorithm.advantage` may be functions of a file.
    overrides: `key.path=value`; run_dir: None for `runs/<name>`; `orchestrator.session.session` has `resume`'s parts.

    Raises ConfigError or DataError for a job that cannot run, RunError, CallFailed where it ends early: what is
    committed stays, and `rlhf-orchestrate resume` goes on. Where an event loop runs already (a notebook), it works in a
    thread of its own.
    """
    prepared = session.prepare(_job(job, overrides))
    directory = RunDirectory.create(Path(run_dir or Path("runs") / prepared.job.name), prepared.named)
    run = session.Run(prepared, directory)
    try:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return session.train(run, view or NoView())
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(session.train, run, view or NoView()).result()
    except (ConfigError, DataError):  # found out late: the mended job may have its place
        directory.discard(prepared.job)
        raise


def _job(job: Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> JobConfig:
    if not isinstance(job, Mapping):
        return load_job(Path(job), overrides)
    table = {key: dict(value) if isinstance(value, Mapping) else value for key, value in job.items()}
    for section, key in CODE:
        holder = table.get(section) if section else table
        if isinstance(holder, dict) and (isinstance(holder.get(key), Recipe) or callable(holder.get(key))):
            holder[key] = _place(f"{section}.{key}".lstrip("."), holder[key])
    for override in overrides:
        apply_override(table, override)
    return parse_job(table, base=Path.cwd())


def _place(key: str, code: Recipe | Callable[..., Any]) -> str:
    """`<file.py>:<name>` of a function at the top of a file. Raises ConfigError for another one."""
    function = code.dataflow if isinstance(code, Recipe) else code
    name = getattr(function, "__qualname__", repr(function))
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if not name.isidentifier() or file is None or not Path(file).is_file():
        raise ConfigError(f"{key}: {name} is not at the top of a file: functions elsewhere could not import it")
    return f"{Path(file).resolve()}:{name}"
