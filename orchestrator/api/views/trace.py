"""trace.json as columns per function, read as it grows: replicas' lives in lanes, their calls, and the steps.

A lane is a row of a Gantt chart: a life gets the lowest one that is free for all of it, and keeps it. Times are seconds
since the job's first execution began.
"""

import bisect
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.telemetry.trace import JOB


@dataclass
class Lane:
    """Lives of one row, which do not overlap, by start."""

    starts: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)

    def free(self, start_s: float, stop_s: float) -> bool:
        i = bisect.bisect_right(self.starts, start_s)
        return (i == 0 or self.stops[i - 1] <= start_s) and (i == len(self.starts) or stop_s <= self.starts[i])

    def take(self, start_s: float, stop_s: float) -> None:
        i = bisect.bisect_right(self.starts, start_s)
        self.starts.insert(i, start_s)
        self.stops.insert(i, stop_s)


class Life(NamedTuple):
    """A replica from `start_s` to `stop_s`: starting until `ready_s`, asked to go at `draining_s`."""

    replica: str
    start_s: float
    ready_s: float
    draining_s: float
    stop_s: float


class Work(NamedTuple):
    """A call, as long as its replica was not asked to go."""

    replica: str
    start_s: float
    stop_s: float
    operation: str


@dataclass
class Function:
    """One function's history. `rows` are the lanes of `lives`, `row_of` those of `work` (-1: its life is not known)."""

    lives: list[Life] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)
    """By replica: its last life."""
    _alone: dict[str, list[int]] = field(default_factory=dict)
    """By replica: work whose life has not come."""

    def add_life(self, life: Life) -> None:
        row = place(self.lanes, life.start_s, life.stop_s)
        self._last[life.replica] = len(self.lives)
        self.lives.append(life)
        self.rows.append(row)
        before = [i for i in self._alone.pop(life.replica, ()) if not self._join(i, life, row)]
        if before:  # of a replica of that name whose orchestrator was killed
            self._add_implied(life.replica, before)

    def _add_implied(self, replica: str, work: list[int]) -> None:
        """It lived at least as long as it worked."""
        life = implied(replica, [self.work[i] for i in work])
        row = place(self.lanes, life.start_s, life.stop_s)
        self.lives.append(life)
        self.rows.append(row)
        for i in work:
            self.row_of[i] = row

    def add_work(self, work: Work) -> None:
        self.work.append(work)
        self.row_of.append(-1)
        known = self._last.get(work.replica)
        if known is None or not self._join(len(self.work) - 1, self.lives[known], self.rows[known]):
            self._alone.setdefault(work.replica, []).append(len(self.work) - 1)

    def _join(self, i: int, life: Life, row: int) -> bool:
        work = self.work[i]
        if not life.start_s - 1e-3 <= work.start_s <= life.stop_s:
            return False
        self.row_of[i] = row
        stop_s = max(work.start_s, min(work.stop_s, life.draining_s))
        self.work[i] = Work(work.replica, work.start_s, stop_s, work.operation)
        return True

    def lifeless(self) -> dict[str, list[int]]:
        """Work of replicas whose life is not in the trace: they exist, or their orchestrator was killed."""
        return self._alone


def implied(replica: str, work: list[Work]) -> Life:
    start_s, stop_s = min(w.start_s for w in work), max(w.stop_s for w in work)
    return Life(replica, start_s, start_s, stop_s, stop_s)


def place(lanes: list[Lane], start_s: float, stop_s: float) -> int:
    """The lowest lane that is free from start to stop, which is taken."""
    row = next((row for row, lane in enumerate(lanes) if lane.free(start_s, stop_s)), len(lanes))
    if row == len(lanes):
        lanes.append(Lane())
    lanes[row].take(start_s, stop_s)
    return row


class TraceFile:
    """Not thread-safe. `version` changes whenever something was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.version = 0
        self._clear(0)

    def _clear(self, inode: int) -> None:
        self._inode, self._offset = inode, 0
        self._names: dict[int, str] = {}
        self._lanes: dict[tuple[int, int], str] = {}
        self.functions: dict[str, Function] = {}
        self.steps: list[tuple[int, float, float]] = []
        """(number, start, stop) of committed ones."""
        self.begun_at: float | None = None
        """When the job's first execution began; Unix seconds."""

    def read(self) -> Self:
        """Reads what was appended. Raises RunError for a file that cannot be read."""
        try:
            stat = os.stat(self._path)
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._clear(stat.st_ino)
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._clear(0)
            return self
        except OSError as error:
            raise RunError(f"{self._path}: cannot be read: {error.strerror}") from error
        for event in self._events(data):
            self._add(event)
        return self

    def _events(self, data: bytes) -> Iterator[Json]:
        """Whole events. The offset stays at the last one's end: what comes next is written over the closing bracket."""
        whole = data.rfind(b"}\n]\n") + 1
        if whole:  # as it is between two writes
            with suppress(ValueError):
                events = json.loads(b"[" + data[:whole].lstrip(b"[,\n") + b"]")
                self._offset += whole
                self.version += 1
                yield from events
                return
        base, at = self._offset, 0
        while at < len(data):
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            line = data[at:end].strip(b",\r ")
            if line and line not in (b"[", b"]"):
                try:
                    event = json.loads(line)
                except ValueError:
                    return  # is being written
                self._offset = base + data.rindex(b"}", at, end) + 1
                self.version += 1
                yield event
            at = end + 1

    def _add(self, event: Json) -> None:
        process, kind, args = event["pid"], event["ph"], event["args"]
        if kind == "M":
            if event["name"] == "process_name":
                self._names[process] = args["name"]
                if args["name"] != JOB:
                    self.functions.setdefault(args["name"], Function())
            elif event["name"] == "thread_name":
                self._lanes[process, event["tid"]] = args["name"]
            elif event["name"] == "job_start" and self.begun_at is None:
                self.begun_at = float(args["unix_s"])
        elif kind == "X":
            name, lane = self._names[process], self._lanes[process, event["tid"]]
            start_s, stop_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            if name == JOB:
                if lane == "step":
                    self.steps.append((int(event["name"].removeprefix("step ")), start_s, stop_s))
            elif event["name"] == "replica":
                ready_s = min(stop_s, start_s + args.get("starting_s", 0.0))
                draining_s = stop_s - args.get("draining_s", 0.0)
                self.functions[name].add_life(Life(lane, start_s, ready_s, draining_s, stop_s))
            else:
                self.functions[name].add_work(Work(lane, start_s, stop_s, event["name"]))
