"""One attempt at a call: what was done before is sent again, what is missing is done, and everything is recorded.

The record of a call is a log in the exchange, one entry an object, claimed with `put_if_absent`:

    calls/<id>/events/000000   samples          event lines, as they were sent
    calls/<id>/events/000001   samples
    calls/<id>/events/000002   cut, done        the last entry ends in `done`
    calls/<id>/<attempt>/...   the values that the events name, in a folder of each attempt's own

An event is sent only when its entry is written, so every attempt sends a prefix of the same history, whoever made
it. Of two attempts at one time the one that claims an entry first wins it; the other finds the entry taken, sends what
stands there, and starts its function again with that as `prior`. So a repeated call never reports anything twice, nor
two results. A cut is recorded with the `done` that follows it: there is no state between them.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from functions.base.wire import Call, Event, Ref, WireError
from functions.call import userfile
from functions.call.function import Cancelled, Context, FatalError, Function, ReplicaBroken, RetryableError
from functions.call.meter import LoadTime, Meter
from functions.exchange.base import Corrupt, Data, Exchange, NotFound, Unavailable, Unsuitable
from functions.exchange.node import node_of
from functions.server.profile import profiled

VALUES_LIFETIME_S = 2 * 86400.0
LOG_LIFETIME_S = 86400.0
"""Shorter than that of the values, so that no entry outlives what it names."""
WATCH_S, SHORT_S = 1.0, 0.1
"""How often the watch for a cut looks whether the call has ended; and how long a call may be that none looks at."""

log = logging.getLogger(__name__)

Outcome = Literal["done", "replayed", "cancelled", "retryable", "fatal", "broken"]


class EntryTaken(Exception):
    """Another attempt at the same call has recorded the entry that this one was about to."""


@dataclass
class CallLog:
    """The recorded events of one call."""

    exchange: Exchange
    call: Call
    entries: int = 0
    """Entries read or written so far; the next one has this number."""

    def read(self) -> list[Event]:
        """Events recorded since the last look, by whichever attempt."""
        events: list[Event] = []
        while True:
            try:
                lines = self.exchange.get(self._key())
            except NotFound:
                return events
            try:
                events += [Event.from_line(line) for line in lines.splitlines()]
            except WireError as error:
                raise FatalError(f"{self._key()} is no record of events: {error}") from error
            self.entries += 1

    def record(self, lines: Sequence[bytes]) -> None:
        """Claims the next entry. Raises EntryTaken."""
        if self.exchange.put_if_absent(self._key(), list(lines), lifetime_s=LOG_LIFETIME_S) is None:
            raise EntryTaken
        self.entries += 1

    def _key(self) -> str:
        return f"{self.call.prefix}events/{self.entries:06d}"


@dataclass(frozen=True)
class OwnFolder:
    """The exchange as a function sees it: keys under `shared` lie under `own`; Refs and other keys are unchanged.

    What a function puts there without a lifetime is what it has made, and entries of the record will name it: it is put
    as they are (`put_if_absent`), so that no loss of a cache takes it and leaves them.
    """

    exchange: Exchange
    shared: str
    own: str
    meter: Meter

    @property
    def durable(self) -> Exchange:
        return OwnFolder(self.exchange.durable, self.shared, self.own, self.meter)

    def _at(self, key: str) -> str:
        return self.own + key.removeprefix(self.shared) if key.startswith(self.shared) else key

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        at, lasts_s = self._at(key), self._lifetime(key, lifetime_s)
        made = lifetime_s is None and key.startswith(self.shared)
        ref = self.exchange.put_if_absent(at, data, lifetime_s=lasts_s) if made else None
        if ref is None:
            ref = self.exchange.put(at, data, lifetime_s=lasts_s)
        self.meter.moved(bytes_out=ref.size_bytes)
        return ref

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        ref = self.exchange.put_if_absent(self._at(key), data, lifetime_s=self._lifetime(key, lifetime_s))
        self.meter.moved(bytes_out=0 if ref is None else ref.size_bytes)
        return ref

    def _lifetime(self, key: str, lifetime_s: float | None) -> float | None:
        return VALUES_LIFETIME_S if lifetime_s is None and key.startswith(self.shared) else lifetime_s

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        data = self.exchange.get(key if isinstance(key, Ref) else self._at(key), start=start, length=length)
        self.meter.moved(bytes_in=len(data))
        return data

    def list(self, prefix: str) -> list[str]:
        return self.exchange.list(self._at(prefix))

    def wait(self, key: str, timeout_s: float) -> bool:
        return self.exchange.wait(self._at(key), timeout_s)

    def delete(self, prefix: str) -> int:
        return self.exchange.delete(self._at(prefix))


@dataclass
class Attempt:
    """One attempt. `run` blocks until it has ended; `cut` and `cancelled` may be set from any thread meanwhile."""

    call: Call
    send: Callable[[bytes], None]
    """Takes the lines of the answer, in order."""
    cut: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: dict[str, Any] = field(default_factory=dict)
    """Data for the next heartbeat."""
    loading: LoadTime = field(default_factory=LoadTime)
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = Meter(self.call.operation, self.call.trace)

    def run(
        self, function: Callable[[], Function], exchange: Callable[[], Exchange], scratch: str,
        opened: tuple[str, str] | None = None,
    ) -> Outcome:  # fmt: skip
        """Sends the events of the call. Failures are sent as an `error` event, never raised. `opened`: as Context's."""
        self.meter.begun("start")  # until this thread was free, and had loaded the function
        try:
            return self._run(function, exchange(), scratch, opened)
        except Cancelled:
            return "cancelled"
        except FatalError as error:
            return self._error("fatal", " ".join(str(error).split()))
        except RetryableError as error:
            self._error("retryable", " ".join(str(error).split()), **_store_marks(error))
            return "broken" if isinstance(error, ReplicaBroken) else "retryable"
        except Unavailable as error:
            log.warning("%s", error)
            return self._error("retryable", " ".join(str(error).split()), **_store_marks(error))
        except (Corrupt, Unsuitable) as error:  # wrong, not away
            return self._error("fatal", " ".join(str(error).split()), **_store_marks(error))
        except Exception as error:
            log.exception("%s", userfile.describe(error))
            return self._error("retryable", userfile.describe(error), **_store_marks(error))

    def _error(self, kind: Literal["retryable", "fatal"], message: str, **marks: str) -> Outcome:
        self._tell()
        self.send(Event("error", data={"kind": kind, "message": message, **marks}).to_line())
        return kind

    def _tell(self) -> None:
        """Where the time went, before the last line."""
        self.send(Event("progress", data={"meter": self.meter.to_json()}).to_line())

    def _run(
        self, function: Callable[[], Function], exchange: Exchange, scratch: str, opened: tuple[str, str] | None
    ) -> Outcome:
        record = CallLog(exchange, self.call)
        prior: list[Event] = []
        stop = threading.Event()
        threading.Thread(target=self._watch, args=(exchange, stop), name="cut", daemon=True).start()
        try:
            while True:
                for event in record.read():
                    self.send(event.to_line())
                    if event.kind == "done":
                        return "replayed"
                    prior.append(event)
                folder = f"{self.call.prefix}{secrets.token_hex(4)}/"
                own = OwnFolder(exchange, self.call.prefix, folder, self.meter)
                context = Context(
                    own, scratch, iter(prior), self.cut, self.cancelled, self.progress.update, self.meter, self.loading,
                    node_of(exchange), opened,
                )  # fmt: skip
                try:
                    self._once(function(), record, context, prior)
                    return "done"
                except EntryTaken:
                    log.warning("another attempt is ahead, taking up from there")
        finally:
            stop.set()

    def _once(self, function: Function, record: CallLog, context: Context, prior: list[Event]) -> None:
        """Runs the function, recording and sending its events; those recorded are added to `prior`."""
        events = function.call(self.call, context)
        if self.call.profile:
            events = profiled(events, context, f"{self.call.prefix}profile.json.gz")
        try:
            for event, lines in _entries(events):
                context.check()
                record.record(lines)
                if event.kind == "done":
                    self._tell()
                for line in lines:
                    self.send(line)
                if event.kind == "done":
                    return
                prior.append(event)
        finally:
            if isinstance(events, Generator):
                events.close()
        raise FatalError(f"{type(function).__name__} ended {self.call.operation!r} without a `done` event")

    def _watch(self, exchange: Exchange, stop: threading.Event) -> None:
        """Sets `cut` when the key that asks for it appears."""
        while not stop.wait(SHORT_S):
            try:
                if exchange.wait(self.call.cut_key, WATCH_S):
                    self.cut.set()
                    return
            except Unavailable:
                stop.wait(WATCH_S)


def _store_marks(error: BaseException | None) -> dict[str, str]:
    """What the exchange had to do with it: {"away": store}, {"lost": key} or nothing."""
    while error is not None:
        if isinstance(error, Unavailable):
            return {"away": error.store}
        if isinstance(error, NotFound) and error.key:
            return {"lost": error.key}
        error = error.__cause__
    return {}


def _entries(events: Iterator[Event]) -> Iterator[tuple[Event, list[bytes]]]:
    """Groups a function's events into log entries: one `samples` each; what was cut together with `done`."""
    held: list[bytes] = []
    for event in events:
        if event.kind not in ("samples", "cut", "done"):
            raise FatalError(f"a function yields samples, cut and done events, not {event.kind!r}")
        if held and event.kind == "samples":
            raise FatalError("a function yielded 'samples' after a cut; `done` has to follow it")
        try:
            line = event.to_line()
        except (TypeError, ValueError) as error:
            raise FatalError(f"the data of a {event.kind!r} event has no JSON form: {error}") from error
        held.append(line)
        if event.kind != "cut":
            yield event, held
            held = []
