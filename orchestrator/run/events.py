"""`events.jsonl`: what happened to a run, one JSON line an event; the job API replays it.

    {"id": 7, "time": 1763728800.123, "type": "step", "data": {"step": 3, "cost_usd": 0.0042, ...}}

Ids count from 1 and are the line numbers, over all executions of the run. The holder of the run's lock writes; anyone
reads. Step and validation events follow the journal: what a killed execution had committed and not yet told is told by
the next one, and nothing is told twice.

type              data
started           execution (1 for the first), step (the last committed; -1: none), steps
stage             step (the one at work), stages (functions at work now), replicas {function: how many exist}
step              step, metrics (the few that a person follows), cost_usd (of the job until then), versions
validation        step, metrics (val-core/...)
sample_failures   step, count, first (of what scorers said: group, index, message)
note              message, back_to (where steps after that one were lost)
finished          model (directory)
failed            message
cancelled         message
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from functions.base.wire import Json
from orchestrator.base.errors import OrchestratorError, RunError
from orchestrator.base.files import Lines, nofollow
from orchestrator.run.directory import RunDirectory

FILE = "events.jsonl"
log = logging.getLogger(__name__)
EventType = Literal[
    "started", "stage", "step", "validation", "sample_failures", "note", "finished", "failed", "cancelled"
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
END_TYPES: frozenset[EventType] = frozenset({"finished", "failed", "cancelled"})
"""After one of these the execution is over; `started` may follow."""


@dataclass(frozen=True)
class RunEvent:
    id: int
    time: float
    """Unix seconds."""
    type: EventType
    data: Json

    def encode(self) -> bytes:
        value = {"id": self.id, "time": round(self.time, 3), "type": self.type, "data": self.data}
        return json.dumps(value, allow_nan=False).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> RunEvent:
        """Raises ValueError for what is no event."""
        try:
            value = json.loads(line)
            event = cls(int(value["id"]), float(value["time"]), value["type"], dict(value["data"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not an event ({error!r})") from error
        if event.type not in EVENT_TYPES:
            raise ValueError(f"not an event (type {event.type!r})")
        return event


def read_events(path: Path, *, start: int = 0) -> tuple[list[RunEvent], int]:
    """The whole events from byte `start` on, and the byte after them; a line that is being written is left out.

    Raises RunError for a file that holds something else.
    """
    try:
        with open(path, "rb", opener=nofollow) as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    whole = data[: data.rfind(b"\n") + 1]
    try:
        return [RunEvent.decode(line) for line in whole.splitlines()], start + len(whole)
    except ValueError as error:
        raise RunError(f"{path}: {error}; move it away, the next `resume` writes it anew from the journal") from error


class EventLog:
    """The log of a run, opened by the one execution that holds the run's lock."""

    def __init__(self, directory: Path) -> None:
        path = directory / FILE
        events, end = read_events(path)
        self.executions = sum(event.type == "started" for event in events)
        self._told = set[tuple[EventType, int]]()
        for event in events:
            if "back_to" in event.data:
                self._told = {(kind, step) for kind, step in self._told if step <= event.data["back_to"]}
            elif "step" in event.data:
                self._told.add((event.type, event.data["step"]))
        self._next = events[-1].id + 1 if events else 1
        self._lines = Lines(path, end)

    @property
    def last_step(self) -> int:
        """The last step that was told as committed; -1: none."""
        return max((step for kind, step in self._told if kind == "step"), default=-1)

    def forget(self, last_step: int, message: str) -> None:
        """Steps after `last_step` are lost: they are told again when they are made again, by this execution or a later
        one. Raises as `append`."""
        self.append("note", {"message": message, "back_to": last_step})
        self._told = {(kind, step) for kind, step in self._told if step <= last_step}

    def append(self, kind: EventType, data: Json) -> RunEvent:
        """Writes one event, and logs it. Raises RunError where it cannot be written."""
        event = RunEvent(self._next, time.time(), kind, data)
        self._lines.append(event.encode())
        self._next += 1
        log.log(_LEVELS.get(kind, logging.INFO), "%s", _said(kind, data), extra={"about": {"event": kind, **data}})
        return event

    def tell(self, kind: EventType, step: int, data: Json) -> None:
        """Writes an event of a step, unless this kind was told of this step before."""
        if (kind, step) not in self._told:
            self._told.add((kind, step))
            self.append(kind, {"step": step, **data})

    def close(self) -> None:
        self._lines.close()


_LEVELS = {"stage": logging.DEBUG, "note": logging.WARNING, "sample_failures": logging.WARNING, "failed": logging.ERROR}


def _said(kind: EventType, data: Json) -> str:
    """An event as a line of the log."""
    if kind == "started":
        last = data.get("step", -1)
        return f"execution {data['execution']} {'begins' if last < 0 else f'goes on from step {last}'}"
    if kind in ("step", "validation"):
        numbers = [f"{name} {value:.4g}" for name, value in data.get("metrics", {}).items()]
        cost = [f"${data['cost_usd']:.4f}"] if data.get("cost_usd") else []
        return "  ".join([f"{kind} {data['step']}", *numbers, *cost])
    if kind == "sample_failures":
        return f"{data['count']} samples of step {data['step']} have no score: {data['first'][0]['message']}"
    return str(data.get("message", kind))


@contextmanager
def open_events(directory: Path) -> Iterator[EventLog]:
    """The log of an execution; how the execution ended, if not by SIGKILL, is its last event."""
    log = EventLog(directory)
    try:
        yield log
    except asyncio.CancelledError:
        log.append("cancelled", {"message": "stopped; what is committed stays, and `resume` goes on from it"})
        raise
    except BaseException as error:
        failure = first_failure(error)
        known = isinstance(failure, OrchestratorError)
        log.append("failed", {"message": str(failure) if known else f"{type(failure).__name__}: {failure}"})
        raise
    else:
        log.append("finished", {"model": "model"})
    finally:
        log.close()


def tell_end(directory: RunDirectory, kind: EventType, message: str) -> None:
    """Writes the end of a run that no orchestrator is working on. Raises RunError where one is."""
    with directory.lock():
        log = EventLog(directory.path)
        try:
            log.append(kind, {"message": message})
        finally:
            log.close()


@contextmanager
def failure_told(directory: RunDirectory) -> Iterator[None]:
    """What a user can mend, found before the run's lock was taken, is told as the run's failure."""
    try:
        yield
    except OrchestratorError as error:
        tell_end(directory, "failed", str(error))
        raise


def first_failure(error: BaseException) -> BaseException:
    """The failure that ended a task group: the first one in it that a user can read, else the first."""
    leaves = list(_leaves(error))
    return next((e for e in leaves if isinstance(e, OrchestratorError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
