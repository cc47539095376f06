"""The run directory `runs/<job>/`: what a person finds of a job, and the lock that keeps two orchestrators apart.

run.json       format and how the job was started     trace.json    opens in Perfetto
job.toml       the resolved job                       samples/      prompt, response, reward of each step
journal/       the committed history                  model/        the final policy, for transformers
metrics.jsonl  one line a step                        tensorboard/  event files
cost.json      replica-seconds and dollars            events.jsonl  what happened, one line an event
now.json       replicas at this moment                plans.jsonl   what was decided before each step
profile/       traces of calls, by step and function  code/         functions of a notebook
lock           held while an orchestrator works      api.json, process, orchestrator.log   of the job API
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from functions.exchange.base import Exchange, ExchangeError, Unavailable
from functions.exchange.open import open_exchange
from orchestrator.base.errors import Away, ConfigError, RunError
from orchestrator.base.files import write_atomically
from orchestrator.job.config import JobConfig, dump_job, load_job
from orchestrator.run.identity import JOURNAL, RunIdentity, delete_held, may_change

FORMAT = 2
PROFILE = "profile"
LOCK_TRIES = 20
LONGEST = 28
"""Of names with digits: a function's name and a revision's number come after them, and a label holds 63."""
_DIGITS = 5
"""Bytes."""


class RunDirectory:
    """An opened run directory; `path` exists and has this version's format."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, job: JobConfig) -> Self:
        """Makes a new one. Raises RunError where there is a run already."""
        if (path / "run.json").exists():
            raise RunError(
                f"{path}: holds a run already; go on with `rlhf-orchestrate resume {path}`, "
                "or start another with `--run-dir DIR` or `name=OTHER`"
            )
        for name, data in cls.new(job).items():
            write_atomically(path / name, data)
        return cls(path)

    @staticmethod
    def new(job: JobConfig) -> dict[str, bytes]:
        """The files that make a directory a run; the last one does."""
        run = {"format": FORMAT, "job": job.name, "id": uuid.uuid4().hex[:12]}
        return {"job.toml": dump_job(job).encode(), "run.json": json.dumps(run).encode() + b"\n"}

    @classmethod
    def open(cls, path: Path) -> Self:
        try:
            found = json.loads((path / "run.json").read_text())
        except FileNotFoundError:
            raise RunError(f"{path}: no run directory (it has no run.json); name one that `run` has made") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path / 'run.json'}: cannot be read: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            got = found.get("format") if isinstance(found, dict) else found
            raise RunError(f"{path}: made by another version (format {got!r}, this one reads {FORMAT})")
        return cls(path)

    def identity(self, job: JobConfig) -> RunIdentity:
        run = json.loads((self.path / "run.json").read_text())
        return RunIdentity.of(run["id"], f"{socket.gethostname()}:{self.path.resolve()}", job)

    def discard(self, job: JobConfig) -> None:
        """Removes the run and what it has in its exchange, unless it has committed something."""
        if any(self.path.glob("journal/*")):
            return
        if job.exchange.url is not None:
            exchange = self.open_exchange(job)
            if exchange.durable.list(JOURNAL):
                return
            delete_held(exchange, self.identity(job))
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def job(self) -> JobConfig:
        return load_job(self.path / "job.toml")

    def changed_job(self, overrides: Sequence[str]) -> JobConfig:
        """The job with `key.path=value` over it. Raises ConfigError for keys that the run's history follows from."""
        job, changed = self.job, load_job(self.path / "job.toml", overrides)
        before, after = self.identity(job).job, self.identity(changed).job
        parts = {part for part in before if before[part] != after[part]}
        parts |= {part for part in ("name", "exchange") if getattr(job, part) != getattr(changed, part)}
        keys = [override.partition("=")[0] for override in overrides]
        wrong = [key for key in keys if key.split(".")[0] in parts and not may_change(key)]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: what {self.path} has committed follows from it; start another run (`run` with "
                "--run-dir DIR)"
            )
        return changed

    def write_job(self, job: JobConfig) -> None:
        """Raises RunError where an orchestrator is working on the run."""
        with self.lock():
            write_atomically(self.path / "job.toml", dump_job(job).encode())

    def exchange(self, job: JobConfig) -> tuple[str, str]:
        """URL of the job's exchange and the job's root in it; the default is this directory itself."""
        if job.exchange.url is not None:
            return job.exchange.url, job.name
        path = self.path.resolve()
        return str(path.parent), path.name

    def open_exchange(self, job: JobConfig) -> Exchange:
        """Raises ConfigError for a URL or name that cannot be one, Away for a store that does not answer, RunError for
        one that cannot be used."""
        url, root = self.exchange(job)
        try:
            return open_exchange(url, root)
        except ValueError as error:
            raise ConfigError(f"exchange.url: {error}") from error
        except Unavailable as error:
            raise Away(error.store, f"exchange {url}: {error}") from error
        except ExchangeError as error:
            raise RunError(f"exchange {url}: {error}") from error

    def lock(self) -> IO[str]:
        """Takes the run's lock until the returned file is closed (or this process ends, however it ends)."""
        file = (self.path / "lock").open("a+")
        for tries_left in range(LOCK_TRIES, -1, -1):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if tries_left:  # `holder` has it for an instant when it looks
                    time.sleep(0.01)
                    continue
                file.seek(0)
                holder = file.read().strip() or "unknown"
                file.close()
                raise RunError(
                    f"{self.path}: another orchestrator (process {holder}) is working on this run; "
                    f"wait for it, or stop it with `rlhf-orchestrate cancel {self.path}`"
                ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        return file

    def holder(self) -> int | None:
        """The process that works on this run now; None where nobody does."""
        try:
            with (self.path / "lock").open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return int(file.read().strip())
        except (FileNotFoundError, ValueError):
            return None
        return None


def profiles_of(run: Path) -> list[Path]:
    """Traces of calls, `profile/NNNNNN/<function>-<n>.json.gz`."""
    return sorted((run / PROFILE).glob("[0-9]*/*.json.gz"))


def unique_name(name: str) -> str:
    """`arithmetic-3f9a1c0b2d`: what a job is called where others have theirs, a namespace or a server."""
    digits = secrets.token_hex(_DIGITS)
    return f"{name[: LONGEST - len(digits) - 1].rstrip('-')}-{digits}"
