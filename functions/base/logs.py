"""Log lines: JSON where nobody watches, one line for people on a terminal.

    {"time": "2026-11-21T14:02:11.042Z", "level": "info", "message": "done in 3.21 s", "job": "sums",
     "function": "generate", "replica": "generate-0", "step": 7, "call": "s000007.generate.1c0a...", "trace": "4bf9..."}

What is printed (a scorer's `print`, a library's warning) is wrapped in the same form, with the call that was at work: a
process works on one call at a time. What code below Python writes stays as it is; readers take a line that is not JSON
for its message.
"""

import io
import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TextIO

LEVELS = ("debug", "info", "warning", "error")
QUIET = ("httpx", "uvicorn")
"""Libraries that tell of every request, or of their own start and end."""
_LONGEST = 1 << 16
"""Of a printed line without its end."""


@dataclass
class About:
    """What the lines of this process say besides their message. `call` is replaced as a whole, from any thread."""

    process: Mapping[str, Any]
    call: Mapping[str, Any] = field(default_factory=dict)


class LineHandler(logging.Handler):
    """Writes records to `stream`, a line each, in one write."""

    def __init__(self, stream: TextIO, about: About) -> None:
        super().__init__()
        self._stream, self._about, self._as_json = stream, about, not stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = to_json(record, self._about) if self._as_json else to_text(record, self._about)
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a closed stream: there is nobody left to tell
            pass


def to_json(record: logging.LogRecord, about: About) -> str:
    value: dict[str, Any] = {
        "time": _time(record.created),
        "level": _level(record.levelno),
        "message": record.getMessage(),
        **about.process,
        **about.call,
        **getattr(record, "about", {}),
    }
    if record.exc_info:
        value["exception"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(value, ensure_ascii=False, default=str)


def to_text(record: logging.LogRecord, about: About) -> str:
    more = {**about.call, **getattr(record, "about", {})}
    error = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
    step, call = more.get("step"), str(more.get("call", ""))
    return str(LogLine(record.getMessage(), _level(record.levelno), _time(record.created), step, call, error))


class Printed(io.TextIOBase):
    """Stands for sys.stdout or sys.stderr: a log record for each line."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._rest = stream, name, ""
        self._log = logging.getLogger(name)

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], ""
        for line in lines:
            shown = line.rpartition("\r")[2].rstrip()  # of a progress bar, its last state
            if shown:
                self._log.info("%s", shown)
        return len(text)

    def flush(self) -> None:
        """A line is written when its end comes; `finish` writes what has none."""

    def finish(self) -> None:
        if self._rest:
            self.write("\n")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has it as a variable
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        return self._stream.buffer


def log_lines(about: About, *, stream: TextIO | None = None) -> LineHandler:
    """From here on all log records go to `stream` (standard error); JSON unless it is a terminal."""
    stream = stream or sys.stderr
    handler = LineHandler(stream, about)
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, LineHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    return handler


def catch_printed() -> None:
    """Puts what is printed from here on through the log, unless a person watches."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not stream.isatty() and not isinstance(stream, Printed):
            setattr(sys, name, Printed(stream, name))


def finish_printed() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Printed):
            stream.finish()


@dataclass(frozen=True)
class LogLine:
    """A line of a log as it was read: of one that is not JSON, its message."""

    message: str
    level: str = "info"
    time: str = ""
    step: int | None = None
    call: str = ""
    exception: str = ""

    @classmethod
    def parse(cls, line: str) -> Self:
        try:
            value = json.loads(line)
            step, level = value.get("step"), str(value["level"])
            return cls(
                str(value["message"]), level if level in LEVELS else "info", str(value["time"]),
                None if step is None else int(step), str(value.get("call", "")), str(value.get("exception", "")),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(line)

    def __str__(self) -> str:
        """For people: `14:02:11  warning  step 7  call s000007...  the message`, and the traceback below it."""
        words = [self.time[11:19], self.level] if self.time else []
        words += [f"step {self.step}"] if self.step is not None else []
        words += [f"call {self.call}"] if self.call else []
        return "  ".join([*words, self.message]) + (f"\n{self.exception}" if self.exception else "")


def _level(number: int) -> str:
    return LEVELS[min(3, max(0, number // 10 - 1))]


def _time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1000):03d}Z"
