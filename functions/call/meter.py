"""What a call spends its time on, and the bytes it moves: told to the caller in one line before the answer's last.

    call accepted                                                    last line
    |  start  |  read  | fetch | load |        generate             |  publish |
    0 ------------------------------ seconds --------------------------------> stop_s

Times are seconds since the call was accepted, by this process's monotonic clock: whoever draws them beside those of
other machines lays 0 at the moment of `started`, and clocks that differ do no harm. Every span has an id, and the
call's `traceparent` (W3C Trace Context, level 1, section 3.2) is continued: what this call asks of others, and what it
logs, names the span in which it happened.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from functions.base.wire import Json, Wire

TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass
class Span:
    """A part of a call. `parent` is a span of the same call; of the call itself, the caller's span ("": none)."""

    id: str
    parent: str
    name: str
    start_s: float
    stop_s: float | None = None

    def to_json(self, now_s: float) -> Json:
        """A span that is still open ends now."""
        stop_s = now_s if self.stop_s is None else self.stop_s
        ids = {"id": self.id, "parent": self.parent, "name": self.name}
        return ids | {"start_s": round(self.start_s, 6), "stop_s": round(stop_s, 6)}


class Meter:
    """The spans and bytes of one attempt at a call. Phases are of the thread that runs the function; bytes of any."""

    def __init__(self, name: str = "call", trace: Mapping[str, str] | None = None) -> None:
        given = (trace or {}).get("traceparent", "")
        self.trace_id, parent, self._flags = given.split("-")[1:] if TRACEPARENT.fullmatch(given) else ("", "", "00")
        self._zero_s = time.monotonic()
        self._open = [Span(_new_id(), parent, name, 0.0)]
        self.spans = list(self._open)
        self._lock = threading.Lock()
        self.bytes_in = self.bytes_out = 0
        self._carried: list[Span] = []
        self._carried_in = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        span = Span(_new_id(), self._open[-1].id, name, self.now_s())
        self._open.append(span)
        self.spans.append(span)
        try:
            yield
        finally:
            span.stop_s = self.now_s()
            self._open.remove(span)

    def begun(self, name: str) -> None:
        """A phase that has lasted since the call was accepted, and is over."""
        self.spans.append(Span(_new_id(), self._open[0].id, name, 0.0, self.now_s()))

    def moved(self, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        with self._lock:
            self.bytes_in += bytes_in
            self.bytes_out += bytes_out

    def carry(self, before: Meter) -> None:
        """Tells the caller also what was done for this call before it began: all the bytes that `before` has read, and
        of its phases what lies within this call, which had to wait for them."""
        shift_s = before._zero_s - self._zero_s
        self._carried_in += before.bytes_in
        for span in before.spans[1:]:
            stop_s = shift_s + (before.now_s() if span.stop_s is None else span.stop_s)
            if stop_s > 0:
                parent = self.spans[0].id if span.parent == before.spans[0].id else span.parent
                self._carried.append(Span(span.id, parent, span.name, max(0.0, shift_s + span.start_s), stop_s))

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s

    @property
    def traceparent(self) -> str | None:
        """For requests to others: the innermost open span as their parent."""
        return f"00-{self.trace_id}-{self._open[-1].id}-{self._flags}" if self.trace_id else None

    def to_json(self) -> Json:
        now_s = self.now_s()
        spans = [span.to_json(now_s) for span in (*self.spans, *self._carried)]
        return {"spans": spans, "bytes_in": self.bytes_in + self._carried_in, "bytes_out": self.bytes_out}


class LoadTime:
    """How long a call loads, or waits for its replica's loading ahead of it (functions/server/preload.py)."""

    def __init__(self, waited_s: float = 0.0, ahead_s: float | None = None) -> None:
        """`ahead_s`: in a replica's first call, the seconds that it had loaded when the call came."""
        self._seconds, self._ahead_s = waited_s, ahead_s

    @contextmanager
    def timed(self) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - begun_s

    def stats(self) -> dict[str, float]:
        """For the data of `done`."""
        ahead = {} if self._ahead_s is None else {"loaded_ahead_s": round(self._ahead_s, 6)}
        return {"load_s": round(self._seconds, 6), **ahead}


@dataclass(frozen=True)
class Told(Wire):
    """What `Meter.to_json` says, as its reader gets it."""

    spans: tuple[Span, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0


def _new_id() -> str:
    return secrets.token_hex(8)
