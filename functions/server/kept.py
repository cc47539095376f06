"""A process that the agent keeps, in whatever state; what it takes, and what it has started."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from functions.server.forked import Start
from functions.server.lines import Lines

PARK_S, WAKE_S = 120.0, 10.0
"""Most that a process takes to leave its accelerator, and to say that it has heard that it is wanted."""

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")

State = Literal["working", "parking", "parked", "waking", "ending"]


@dataclass(eq=False)
class Replica:
    """A process. `start` is that of its life, or the last one's while it is parked."""

    number: int
    keeper: int
    pid: int
    control: Lines
    start: Start
    begun_s: float
    client: Lines | None
    """Who uses it, and has not been told that it is gone; None: nobody, it is parked, or its client went first."""
    state: State = "working"
    since_s: float = 0.0
    version: int = -1
    measured_bytes: int = 0
    """While it is parked, once somebody wants to know."""
    following: tuple[Lines, Start] | None = None
    """The start, and whose, that waits: for it to be awake, or to have parked."""

    def enter(self, state: State) -> None:
        self.state, self.since_s, self.measured_bytes = state, time.monotonic(), 0

    @property
    def resident_bytes(self) -> int:
        """Memory that would be free without this process: what it shares is counted in parts (proc(5), Pss). The
        kernel walks all of its pages for it."""
        if not self.measured_bytes:
            lines = _read(Path(f"/proc/{self.pid}/smaps_rollup")).splitlines()
            self.measured_bytes = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return self.measured_bytes

    @property
    def at_most_bytes(self) -> int:
        """That and what it shares with others (proc(5), statm)."""
        return sum(int(pages) * PAGE_BYTES for pages in _read(Path(f"/proc/{self.pid}/statm")).split()[1:2])

    @property
    def late_s(self) -> float:
        """When it has taken too long for what it was told; never where it was told nothing."""
        return self.since_s + {"parking": PARK_S, "waking": WAKE_S}.get(self.state, float("inf"))


def identity(start: Start) -> str:
    """What must be equal for a parked process to serve a start: everything but its name and log, the job's token and
    the devices included."""
    settings = {key: value for key, value in start.settings.items() if key not in ("name", "scratch")}
    return json.dumps([settings, start.memory_gb, dict(start.env)], sort_keys=True)


def awaited(parking: Replica, start: Start) -> bool:
    """Whether a start has to wait until it has parked: it is to have this process, or a device that it is leaving after
    its client has gone. One start waits for one process."""
    if parking.following is not None:
        return False
    shared = any(_devices(parking.start, name) & _devices(start, name) for name in DEVICES)
    return identity(parking.start) == identity(start) or (parking.client is None and shared)


def _devices(start: Start, name: str) -> set[str]:
    return set(start.env.get(name, "").split(",")) - {""}


def started_by(replica: Replica) -> list[int]:
    """Processes that it has started, and those that they left to its keeper."""
    found = [int(pid) for path in Path(f"/proc/{replica.pid}/task").glob("*/children") for pid in _read(path).split()]
    of_keeper = _read(Path(f"/proc/{replica.keeper}/task/{replica.keeper}/children")).split()
    return found + [int(pid) for pid in of_keeper if int(pid) != replica.pid]


def _read(path: Path) -> str:
    """Nothing where the process has just ended."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
