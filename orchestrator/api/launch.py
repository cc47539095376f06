"""Where orchestrators of jobs run. A launcher only starts, stops and lists: what a job has done stands in its run
directory, so a server that restarts finds everything again.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from orchestrator.base.errors import RunError
from orchestrator.base.files import write_atomically

OUTPUT = "orchestrator.log"
PROCESS = "process"


class Launcher(Protocol):
    """Four methods, all blocking and safe to repeat. Raise RunError when what they use is away."""

    def start(self, job: str, launch: int) -> None:
        """Starts `rlhf-orchestrate resume <run directory>`: the job's `launch`-th start; nothing if that one exists."""

    def stop(self, job: str) -> None:
        """Asks the job's orchestrator to end in order (SIGTERM); returns at once."""

    def alive(self, jobs: Iterable[str]) -> frozenset[str]:
        """Those of the jobs whose orchestrator exists: starting, at work or ending."""

    def keep(self) -> None:
        """Sees to it that they have what they need of this server; called now and then."""


class Alone:
    """The one server of its runs, which leads: it starts jobs. leader.py has one of several."""

    def __call__(self) -> bool:
        """Whether this server leads now."""
        return True

    def look(self) -> None:
        """Begins to lead, or goes on with it, if that may be; called about every second."""

    def let_go(self) -> None:
        """Another may lead."""


class LocalLauncher:
    """Processes on this machine, in sessions of their own: they go on when this one ends.

    `<run>/process` has a process's id and start time, so that a number that was given anew is not taken for it.
    """

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: str, launch: int) -> None:
        directory = self._runs / job
        if self.alive([job]):
            return
        try:
            with (directory / OUTPUT).open("ab") as output:
                child = subprocess.Popen(
                    [sys.executable, "-m", "orchestrator.commands", "resume", str(directory)],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            self._children[job] = child
            write_atomically(directory / PROCESS, f"{child.pid} {started(child.pid)}\n".encode())
        except OSError as error:
            raise RunError(f"{directory}: its orchestrator cannot be started: {error}") from error

    def stop(self, job: str) -> None:
        process = self._process(job)
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def alive(self, jobs: Iterable[str]) -> frozenset[str]:
        return frozenset(job for job in jobs if self._process(job) is not None)

    def keep(self) -> None:
        """They are processes of this one's user, with its environment."""

    def _process(self, job: str) -> int | None:
        child = self._children.get(job)
        if child is not None:
            if child.poll() is None:  # and reaps it
                return child.pid
            del self._children[job]
            return None
        try:
            pid, since = (self._runs / job / PROCESS).read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if started(int(pid)) == since else None


def started(pid: int) -> str:
    """When the process was started, in the kernel's ticks; "" for none, and for one that has ended (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
