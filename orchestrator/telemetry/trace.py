"""`trace.json`: what ran when, in the Chrome trace event format (JSON array form), for ui.perfetto.dev.

    process "job"        thread "step", "gen"   a lane per stage, with a span for each step's
    process "generate"   thread "generate-0"    a lane per replica: its life, and in it a span per call with its phases
                         counter "replicas"     how many exist

The file is a whole JSON array after every write: the closing bracket is overwritten by what follows it. A kill in the
middle of a write leaves an array without its end, which viewers open too; the next execution repairs it. Times are
microseconds since the job's first execution began, so that a resumed job goes on to the right of what came before.

Format: "Trace Event Format" (Google, 2016), events X (complete), C (counter), M (metadata), and for the phases of a
call B and E (begin, end).
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.base.files import write_atomically, writing
from orchestrator.platforms.base import Usage

JOB = "job"
START = b"[\n"
END = b"\n]\n"


@dataclass(frozen=True)
class TraceSpan:
    """Something that took from `start_s` to `stop_s` (event-loop seconds) in `lane` of `group`.

    `group` is a function's name (then `lane` is a replica) or JOB.
    """

    group: str
    lane: str
    name: str
    start_s: float
    stop_s: float
    args: Mapping[str, Any] = field(default_factory=dict)
    phases: Sequence[tuple[str, float, float]] = ()
    """(name, start, stop) of what lies in it, event-loop seconds."""


class Trace:
    """Appends to `path`. `now_s` is the event loop's time, `unix_s` the wall clock's at the same moment."""

    def __init__(self, path: Path, *, now_s: float, unix_s: float) -> None:
        self._path = path
        with writing(path):
            events = read_events(path) or [_metadata(0, 0, "job_start", unix_s=unix_s)]
            write_atomically(path, START + b",\n".join(map(_encode, events)) + END)
            self._file = os.open(path, os.O_WRONLY)
        self._end = path.stat().st_size - len(END)
        first_s = next((float(e["args"]["unix_s"]) for e in events if e["name"] == "job_start"), unix_s)
        self._zero_s = now_s - max(0.0, unix_s - first_s)
        """Event-loop time of the trace's 0."""
        self._processes = {e["args"]["name"]: int(e["pid"]) for e in events if e["name"] == "process_name"}
        self._threads = {(e["pid"], e["args"]["name"]): int(e["tid"]) for e in events if e["name"] == "thread_name"}
        self._written_s = now_s
        self._lives: set[tuple[str, str, float]] = set()

    def write(self, spans: Iterable[TraceSpan], usage: Sequence[Usage], now_s: float) -> None:
        """Appends `spans`, the lives of replicas that have ended, and how the number of replicas went since the last
        write. Raises RunError where the file cannot be written.
        """
        lives = [
            TraceSpan(u.function, u.replica, "replica", u.started_s, u.stopped_s, _life(u, u.stopped_s))
            for u in usage
            if u.stopped_s is not None and (u.function, u.replica, u.started_s) not in self._lives
        ]
        self._lives |= {(life.group, life.lane, life.start_s) for life in lives}
        new = [event for span in (*lives, *spans) for event in self._span(span)]
        for function in dict.fromkeys(u.function for u in usage):
            new += self._counter(function, [u for u in usage if u.function == function], now_s)
        self._written_s = now_s
        if new:
            self._append(b"".join(b",\n" + _encode(event) for event in new) + END)

    def close(self) -> None:
        os.close(self._file)

    def job_s(self, time_s: float) -> float:
        """Seconds since the job's first execution began, of an event-loop time."""
        return time_s - self._zero_s

    def _append(self, data: bytes) -> None:
        with writing(self._path):
            written = os.pwrite(self._file, data, self._end)
        if written < len(data):
            raise RunError(f"{self._path}: cannot be written: the disk is full")
        self._end += len(data) - len(END)

    def _us(self, time_s: float) -> int:
        return round((time_s - self._zero_s) * 1e6)

    def _span(self, span: TraceSpan) -> list[Json]:
        """The span, after the names of its process and lane where they are new."""
        process, names = self._process(span.group)
        thread = self._threads.get((process, span.lane))
        if thread is None:
            thread = 1 + sum(pid == process for pid, _ in self._threads)
            self._threads[process, span.lane] = thread
            names.append(_metadata(process, thread, "thread_name", name=span.lane))
        start_us = self._us(span.start_s)
        took_us = max(0, self._us(span.stop_s) - start_us)
        return [
            *names,
            {"ph": "X", "name": span.name, "pid": process, "tid": thread, "ts": start_us, "dur": took_us,
             "args": dict(span.args)},
            *self._phases(span, process, thread),
        ]  # fmt: skip

    def _phases(self, span: TraceSpan, process: int, thread: int) -> list[Json]:
        edges = []
        for name, start_s, stop_s in span.phases:
            start_us = max(self._us(start_s), self._us(span.start_s))
            stop_us = min(self._us(stop_s), self._us(span.stop_s))
            if stop_us > start_us:
                edges += [("B", name, start_us), ("E", name, stop_us)]
        edges.sort(key=lambda edge: (edge[2], edge[0] == "B"))
        return [{"ph": ph, "name": name, "pid": process, "tid": thread, "ts": ts, "args": {}} for ph, name, ts in edges]

    def _process(self, group: str) -> tuple[int, list[Json]]:
        if group in self._processes:
            return self._processes[group], []
        process = self._processes[group] = 1 + len(self._processes)
        order = 0 if group == JOB else process
        return process, [
            _metadata(process, 0, "process_name", name=group),
            _metadata(process, 0, "process_sort_index", sort_index=order),
        ]

    def _counter(self, function: str, lives: Sequence[Usage], now_s: float) -> list[Json]:
        """The number of replicas at each change since the last write: all changes until `now_s` are known by now."""
        edges = [(u.started_s, 1) for u in lives] + [(u.stopped_s, -1) for u in lives if u.stopped_s is not None]
        count = sum(change for time_s, change in edges if time_s <= self._written_s)
        process, events = self._process(function)
        for time_s, change in sorted(edges):
            if self._written_s < time_s <= now_s:
                count += change
                events.append({"ph": "C", "name": "replicas", "pid": process, "tid": 0, "ts": self._us(time_s),
                               "args": {"replicas": count}})  # fmt: skip
        return events


def _life(usage: Usage, stopped_s: float) -> dict[str, float]:
    """What a replica did with its life, in seconds: `starting_s` at its beginning, `draining_s` at its end."""
    args = {"busy_s": usage.busy_s}
    if usage.ready_s is not None:
        args["starting_s"] = usage.ready_s - usage.started_s
    if usage.draining_s is not None:
        args["draining_s"] = stopped_s - usage.draining_s
    return args


def _metadata(process: int, thread: int, kind: str, **args: Any) -> Json:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _encode(event: Json) -> bytes:
    return json.dumps(event, separators=(",", ":"), allow_nan=False).encode()


def read_events(path: Path) -> list[Json]:
    """The events in `path`; of a file that was cut off, those that are whole. Raises RunError for no trace at all."""
    if not path.exists():
        return []
    data = path.read_bytes()
    events: list[Json] = []
    for line in data.removeprefix(START).splitlines():
        try:
            event = json.loads(line.strip().rstrip(b","))
        except ValueError:
            break  # the closing bracket, or where the file was cut off
        events.append(event)
    if data and not data.startswith(START):
        raise RunError(f"{path}: not a trace of this program; move it away to go on with a new one")
    return events


def read_spans(path: Path) -> list[tuple[str, str, Json]]:
    """(process, lane, event) of all that took time. Raises RunError."""
    events = read_events(path)
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lane = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(process[e["pid"]], lane[e["pid"], e["tid"]], e) for e in events if e["ph"] == "X"]
