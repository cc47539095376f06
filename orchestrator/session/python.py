"""A job from Python: what `rlhf-orchestrate run` does, for scripts and notebooks.

from orchestrator import run

def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)

if __name__ == "__main__":                         # functions import this file for `score`
    job = run({
        "name": "first", "steps": 20, "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "data": {"train": "train.jsonl"}, "reward": {"score": score},
    })
    for event in job:
        print(event.type, event.data)
    print(job.wait())
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from orchestrator.base.errors import ConfigError, DataError
from orchestrator.job.config import JobConfig, apply_override, load_job, parse_job
from orchestrator.job.paths import CODE
from orchestrator.recipes.base import Recipe
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import FILE, RunEvent, read_events
from orchestrator.session import session
from orchestrator.session.carried import place_of
from orchestrator.session.open_platform import check_machine
from orchestrator.session.view import View

RUNS = Path("runs")
LOOK_EVERY_S = 0.1


class Running:
    """A job at work in a thread of this process. Iterated it gives what happens, from the start, until the job is over
    (orchestrator/run/events.py has the types of events and their data)."""

    def __init__(self, run: session.Run) -> None:
        self.path = run.directory.path
        """The run directory."""
        self._run = run
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(session.ended(run, View()))
        self._thread = Thread(target=self._work, name=f"job {run.job.name}")
        self._thread.start()

    def __iter__(self) -> Iterator[RunEvent]:
        """Raises what ended the job early: RunError, CallFailed, or Stopped."""
        end, working = 0, True
        while working:
            working = self._alive(LOOK_EVERY_S if end else 0.0)
            events, end = read_events(self.path / FILE, start=end)
            yield from events
        self.wait()

    def wait(self) -> Path:
        """The directory of its model (of the run, with 0 steps), once it is over. Raises as iterating does."""
        while self._alive(None):
            pass
        return self._task.result()

    def stop(self) -> None:
        """Ends it in order: functions go to zero, what is committed stays."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _alive(self, timeout_s: float | None) -> bool:
        try:
            self._thread.join(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            self._thread.join()
            raise
        return self._thread.is_alive()

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(asyncio.wait([self._task]))
        if isinstance(self._task.exception(), ConfigError | DataError):  # found late: the mended job may have its place
            self._run.directory.discard(self._run.job)


def run(
    job: Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), *, run_dir: str | Path | None = None
) -> Running:
    """Begins a job, and returns at once; all that it leaves is in its run directory.

    job: a job file, or what one says as a dict (paths relative to the working directory). In a dict, the keys that may
    be `<file.py>:<name>` may be functions, too: of a file, or of a notebook's cell (orchestrator/session/carried.py).
    overrides: `key.path=value`; run_dir: None for `runs/<name>`.

    Raises ConfigError or DataError for a job that cannot run, RunError where there is a run already.
    """
    parsed, path = _job(job, overrides, None if run_dir is None else Path(run_dir))
    prepared = session.prepare(parsed)
    check_machine(prepared.job, prepared.specs)
    return Running(session.Run(prepared, RunDirectory.create(path, prepared.named)))


def _job(job: Mapping[str, Any] | str | Path, overrides: Sequence[str], run_dir: Path | None) -> tuple[JobConfig, Path]:
    """The job, and its run directory."""
    if not isinstance(job, Mapping):
        parsed = load_job(Path(job), overrides)
        return parsed, run_dir or RUNS / parsed.name
    table = {key: dict(value) if isinstance(value, Mapping) else value for key, value in job.items()}
    for override in overrides:
        apply_override(table, override)
    path = run_dir or RUNS / str(table.get("name"))
    for section, key in CODE:
        holder = table.get(section) if section else table
        if isinstance(holder, dict) and key in holder:
            holder[key] = _named(f"{section}.{key}".lstrip("."), holder[key], path / "code")
    return parse_job(table, base=Path.cwd()), path


def _named(key: str, value: Any, code: Path) -> Any:
    """`value` with each function in it as `<file.py>:<name>`."""
    if isinstance(value, list | tuple):
        return [_named(key, one, code) for one in value]
    if isinstance(value, Mapping):
        return {name: _named(f"{key}.{name}", one, code) for name, one in value.items()}
    return place_of(key, value, code) if isinstance(value, Recipe) or callable(value) else value
