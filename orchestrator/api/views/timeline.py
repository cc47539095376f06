"""Replicas over a window of time: each one in its lane where there is room for it, counts by state where there is not.

State of a replica: starting until it is ready, draining from when it was asked to go, busy while a call is open, else
idle. Counts are means over a bin: with F(t) = sum over intervals [a, b] of max(0, t - a) - max(0, t - b), the mean
number of intervals that are open between t and u is (F(u) - F(t)) / (u - t), which needs two sorted arrays per state.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from functions.base.wire import Json
from orchestrator.api.views.trace import Function, Lane, Life, TraceFile, Work, implied, place
from orchestrator.job.roles import BY_NAME, roles_of
from orchestrator.telemetry.now import FILE, read_now

KEPT = 16
"""Runs whose traces stay parsed."""
ALWAYS = tuple(role.name for role in roles_of((), tail=False))
"""Functions that every job has."""
Array = npt.NDArray[np.float64]


@dataclass
class _Integral:
    """F(t) of some intervals."""

    starts: Array
    stops: Array
    start_sums: Array
    stop_sums: Array

    @classmethod
    def of(cls, pairs: Array) -> Self:
        """Of intervals [N, 2]."""
        starts, stops = np.sort(pairs[:, 0]), np.sort(pairs[:, 1])
        return cls(starts, stops, np.cumsum(np.r_[0.0, starts]), np.cumsum(np.r_[0.0, stops]))

    def means(self, edges: Array) -> Array:
        """The mean number of open intervals between each two of `edges`, which ascend."""
        begun, ended = np.searchsorted(self.starts, edges), np.searchsorted(self.stops, edges)
        integral = begun * edges - self.start_sums[begun] - (ended * edges - self.stop_sums[ended])
        return np.diff(integral) / np.diff(edges)

    def count(self, begin: float, end: float) -> int:
        """How many intervals touch [begin, end]."""
        return int(np.searchsorted(self.starts, end) - np.searchsorted(self.stops, begin))


@dataclass
class _Known:
    """What is worked out of one function's history once: where each rectangle lies, and how many there are when."""

    life_ends: Array
    """[lives, 2]: start and stop."""
    work_ends: Array
    alive: _Integral
    starting: _Integral
    busy: _Integral
    draining: _Integral

    @classmethod
    def of(cls, lives: list[Life], works: list[Work]) -> Self:
        life_ends = _pairs([(life.start_s, life.stop_s) for life in lives])
        work_ends = _pairs([(work.start_s, work.stop_s) for work in works])
        return cls(
            life_ends,
            work_ends,
            _Integral.of(life_ends),
            _Integral.of(_pairs([(life.start_s, life.ready_s) for life in lives])),
            _Integral.of(work_ends),
            _Integral.of(_pairs([(life.draining_s, life.stop_s) for life in lives])),
        )

    def count(self, begin: float, end: float) -> int:
        return self.alive.count(begin, end) + self.busy.count(begin, end)

    def means(self, edges: Array) -> tuple[Array, Array, Array, Array]:
        """Alive, starting, busy, draining."""
        return self.alive.means(edges), self.starting.means(edges), self.busy.means(edges), self.draining.means(edges)


@dataclass
class _Run:
    """A run's parsed trace, and what was worked out of it."""

    trace: TraceFile
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: int = -1
    known: dict[str, _Known] = field(default_factory=dict)
    """By function, of what is in the trace."""


class Timelines:
    """Thread-safe."""

    def __init__(self) -> None:
        self._run = lru_cache(KEPT)(lambda directory: _Run(TraceFile(directory / "trace.json")))

    def window(
        self, directory: Path, may_have: Callable[[str], int], *, from_s: float | None, to_s: float | None, bins: int,
        most: int, alive: bool,
    ) -> Json:  # fmt: skip
        """The Timeline of models.py. `may_have`: a function's greatest number of replicas; `most`: rectangles that
        lanes may have. Raises RunError for files that are none.
        """
        run = self._run(directory)
        with run.lock:
            now = read_now(directory / FILE)
            trace = run.trace.read()
            if run.version != trace.version:
                run.version = trace.version
                run.known = {name: _Known.of(f.lives, f.work) for name, f in trace.functions.items()}
            end_s = max([stop for _, _, stop in trace.steps[-1:]] + ([now["at_s"]] if now else []), default=0.0)
            begin = 0.0 if from_s is None else min(from_s, end_s)
            end = end_s if to_s is None else to_s
            end = max(end, begin + 1e-3)
            open_ = _open(trace, now, end_s)
            count = sum(known.count(begin, end) for known in run.known.values())
            lanes = count + sum(len(lives) + len(works) for lives, works in open_.values()) <= most
            edges = np.linspace(begin, end, bins + 1)
            found = []
            for name in sorted({*ALWAYS, *trace.functions, *open_}, key=_order):
                function = trace.functions.get(name) or Function()
                known = run.known.get(name) or _Known.of([], [])
                row: Json = {"name": name, "most": may_have(name)}
                lives, works = open_.get(name, ([], []))
                if lanes:
                    row |= _lanes(function, known, lives, works, begin, end)
                else:
                    row |= _counts(known, lives, works, edges)
                found.append(row)
            marks = [step for step in trace.steps if step[2] > begin and step[1] < end]
            return {
                "from_s": begin,
                "to_s": end,
                "end_s": end_s,
                "begun_at": trace.begun_at,
                "alive": alive,
                "lanes": lanes,
                "functions": found,
                "steps": [list(step) for step in marks[:: max(1, len(marks) // bins)]],
            }


def _order(name: str) -> tuple[int, str]:
    """As a step uses them."""
    names = list(BY_NAME)
    return (names.index(name) if name in names else len(names)), name


def _open(trace: TraceFile, now: Json | None, end_s: float) -> dict[str, tuple[list[Life], list[Work]]]:
    """Lives that the trace does not have yet, by function, with the work that was seen; those without an end last
    until now.
    """
    found: dict[str, tuple[list[Life], list[Work]]] = {}
    committed_s = trace.steps[-1][2] if trace.steps else 0.0
    for seen in (now or {}).get("lives", ()):
        lives, works = found.setdefault(seen["function"], ([], []))
        stop_s = end_s if seen["stop_s"] is None else seen["stop_s"]
        phases = [*seen["phases"], [None, stop_s]]
        spans = [(a[0], a[1], b[1]) for a, b in itertools.pairwise(phases)]
        ready_s = next((since for state, since, _ in spans if state != "starting"), stop_s)
        if spans and spans[0][0] not in ("starting", None) and spans[0][1] > seen["start_s"]:
            ready_s = seen["start_s"]  # the phases before the last commit are given up
        draining_s = next((since for state, since, _ in spans if state == "draining"), stop_s)
        lives.append(Life(seen["replica"], seen["start_s"], ready_s, draining_s, stop_s))
        works += [
            Work(seen["replica"], max(since, committed_s), until, "")
            for state, since, until in spans
            if state == "busy" and until > committed_s
        ]
    for name, function in trace.functions.items():
        lives, _ = found.setdefault(name, ([], []))
        named = {life.replica for life in lives}
        for replica, which in function.lifeless().items():
            if replica not in named:  # its orchestrator was killed: it lived at least as long as it worked
                lives.append(implied(replica, [function.work[i] for i in which]))
    return found


def _pairs(intervals: list[tuple[float, float]]) -> Array:
    return np.array(intervals, np.float64).reshape(-1, 2)


def _within(ends: Array, begin: float, end: float) -> list[int]:
    """Which of [start, stop] overlap the window."""
    return [int(i) for i in np.flatnonzero((ends[:, 1] > begin) & (ends[:, 0] < end))]


def _lanes(function: Function, known: _Known, lives: list[Life], works: list[Work], begin: float, end: float) -> Json:
    """Lives [lane, start, ready, draining, stop, replica] and calls [lane, start, stop, operation] of the window."""
    lanes = [Lane(list(lane.starts), list(lane.stops)) for lane in function.lanes] if lives else function.lanes
    rows: dict[str, int] = {}
    shown: list[list[int | float | str]] = []
    for i in _within(known.life_ends, begin, end):
        life = function.lives[i]
        shown.append([function.rows[i], life.start_s, life.ready_s, life.draining_s, life.stop_s, life.replica])
    for life in lives:
        rows[life.replica] = place(lanes, life.start_s, life.stop_s)
        if life.stop_s > begin and life.start_s < end:
            shown.append([rows[life.replica], life.start_s, life.ready_s, life.draining_s, life.stop_s, life.replica])
    calls: list[list[int | float | str]] = []
    for i in _within(known.work_ends, begin, end):
        work, row = function.work[i], function.row_of[i]
        calls.append([row if row >= 0 else rows.get(work.replica, 0), work.start_s, work.stop_s, work.operation])
    calls += [
        [rows[w.replica], w.start_s, w.stop_s, w.operation] for w in works if w.stop_s > begin and w.start_s < end
    ]
    return {"lives": [_rounded(row) for row in shown], "calls": [_rounded(row) for row in calls]}


def _rounded(row: list[int | float | str]) -> list[int | float | str]:
    return [round(value, 4) if isinstance(value, float) else value for value in row]


def _counts(known: _Known, lives: list[Life], works: list[Work], edges: Array) -> Json:
    both = zip(known.means(edges), _Known.of(lives, works).means(edges), strict=True)
    alive, starting, busy, draining = (a + b for a, b in both)
    idle = np.maximum(0.0, alive - starting - busy - draining)
    states = {"busy": busy, "idle": idle, "starting": starting, "draining": draining}
    return {"counts": {name: np.round(np.maximum(0.0, values), 3).tolist() for name, values in states.items()}}
