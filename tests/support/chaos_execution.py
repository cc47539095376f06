"""One `run` or `resume` of a chaotic job: who is in it, how it is disturbed, what it leaves.

orchestrator --> node agent -->  keepers --> replicas        (depths 0, 1, 2, 3 of its tree of processes)
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import descendants, exists
from tests.support.tiny_job import arguments

WHO = ("orchestrator", "parent", "keeper", "function")
LIMITS = {"ulimit": (resource.RLIMIT_NOFILE, 40, 100), "disk": (resource.RLIMIT_FSIZE, 4_000, 200_000)}
"""What an execution may run out of: open files, and bytes of a file (its writes fail as on a full disk)."""
PATIENCE_S = 5.0
"""So long is waited for somebody who can be killed."""


@dataclass(frozen=True)
class Ended:
    code: int | None
    """None: it was still there after its time limit, and was killed."""
    output: str


class Execution:
    """`limit`: a key of LIMITS, and where in its range (in [0, 1)) the limit lies."""

    def __init__(
        self, words: Sequence[object], log: Path, env: Mapping[str, str], limit: tuple[str, float] | None = None
    ) -> None:
        command = arguments(*words)
        if limit is not None:
            what, least, most = LIMITS[limit[0]]
            bound = int(least + limit[1] * (most - least))
            command = ["prlimit", f"--{'nofile' if what == resource.RLIMIT_NOFILE else 'fsize'}={bound}", *command]
        self.log, self.begun_s, self.kills = log, time.monotonic(), Counter[str]()
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, env=dict(env), stdout=output, stderr=output)

    def disturb(self, kind: str, pick: float) -> None:
        """Kills whom `kind` names, or ("stop") has one that `pick` chooses stand still for up to two seconds."""
        if kind == "stop":
            everybody = [pid for level in self.levels() for pid in level]
            if everybody and signalled(pid := everybody[int(pick * len(everybody))], signal.SIGSTOP):
                time.sleep(2 * pick)
                signalled(pid, signal.SIGCONT)
            return
        depth, until_s = WHO.index(kind), time.monotonic() + PATIENCE_S
        while len(levels := self.levels()) <= depth and levels and time.monotonic() < until_s:
            time.sleep(0.02)
        there = [pid for pid in levels[depth] if exists(pid)] if depth < len(levels) else []
        if there and signalled(there[int(pick * len(there))], signal.SIGKILL):
            self.kills[kind] += 1

    def levels(self) -> list[list[int]]:
        """Its processes by depth, oldest first."""
        if self.process.poll() is not None:
            return []
        found = [[self.process.pid]]
        while below := [pid for pid in sorted(set(descendants(self.process.pid))) if parent(pid) in found[-1]]:
            found.append(below)
        return found

    def sleep_until(self, seconds: float) -> bool:
        """Until so long after its start; whether it is still there."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, self.begun_s + seconds - time.monotonic()))
        return self.process.poll() is None

    def end(self, limit_s: float) -> Ended:
        try:
            code: int | None = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        return Ended(code, self.log.read_text(errors="replace"))


def parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def signalled(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def marked(mark: str) -> list[int]:
    """Living processes with `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return [pid for pid in found if pid != os.getpid()]


def shared_memory() -> set[str]:
    """Files of /dev/shm that no process has mapped or open."""
    there = {str(path) for path in Path("/dev/shm").glob("*")}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            there -= {line.split()[-1] for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line}
            there -= {os.readlink(link) for link in (process / "fd").iterdir()}
    return there
