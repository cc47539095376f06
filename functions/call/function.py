"""What a function is to the server that runs it: a plain object that knows no HTTP.

    server.py  --call(Call, Context)-->  GenerateFunction | RewardFunction | ReferenceFunction | TrainFunction
               <--- Event, Event ... ---  (a generator, run in the process's main thread; `done` is its last event)

The server adds what every function needs: `started`, the heartbeat, deadlines, idempotency, drain, and the translation
of exceptions into `error` events (attempt.py, server.py).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from functions.base.wire import Call, Event, Load
from functions.call.meter import LoadTime, Meter
from functions.exchange.base import Exchange
from functions.exchange.node import NodeExchange


class FatalError(Exception):
    """The call can never succeed (bad input, a non-finite loss, a scorer that raised): retrying is useless.

    The message is one line: what is wrong, where, and what would be right.
    """


class RetryableError(Exception):
    """The call may succeed when it is repeated, here or on another replica."""


class ReplicaBroken(RetryableError):
    """What this replica holds cannot be trusted any more (an update of its weights failed half-way): the call may
    succeed elsewhere, and the server ends this process when it has reported the error."""


class Cancelled(Exception):
    """The caller has gone, or the deadline has passed: the call ends now."""


@dataclass
class Context:
    """What a call can ask of its surroundings while it runs.

    Long work looks at `check()` at least once a second, and at `cut_requested()` where it can be cut. A replica whose
    call goes on for a minute after it was cancelled ends itself (server.py).
    """

    exchange: Exchange
    """The job's exchange. What is put under `call.prefix` lands in a folder of this attempt's own below it, so that
    two attempts at one call never overwrite each other's values; the Ref that `put` returns says where."""
    scratch: str
    """A directory of this replica's own, gone when the replica goes."""
    prior: Iterator[Event] = field(default_factory=lambda: iter(()))
    """The `samples` events that earlier attempts at this call got done, in order: take up what is missing. They have
    been sent to the caller already."""
    cut: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: Callable[[Mapping[str, Any]], None] = lambda _data: None
    """Sets the data that the next heartbeats carry."""
    meter: Meter = field(default_factory=Meter)
    """What the call spends its time on; it carries the trace that the call is part of."""
    loading: LoadTime = field(default_factory=LoadTime)
    node: NodeExchange | None = None
    """The tier that this node has over the exchange."""
    opened: tuple[str, str] | None = None
    """(URL, job) by which other processes of this replica open the exchange."""

    def cut_requested(self) -> bool:
        return self.cut.is_set()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """`with context.phase("load"): ...` is a span of the call in the trace: read, fetch, load, forward, publish."""
        return self.meter.phase(name)

    def check(self) -> None:
        """Raises Cancelled when the call should end."""
        if self.cancelled.is_set():
            raise Cancelled


class Function(Protocol):
    """One kind of stage. A replica holds one Function object for its whole life and runs one call at a time."""

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        """Does the operation that `call` names, yielding `samples` and `cut` events, and `done` last.

        Raises FatalError for what no repetition can mend, RetryableError for what one may; any other exception is
        retryable and reported with its type. Results are written to the exchange under `call.prefix` before the event
        that names them is yielded. A function that holds state between calls (weights, optimizer state) treats it
        as a cache: it checks version and hash, and loads what it lacks. The generator may be closed at any yield.
        """


@runtime_checkable
class Parks(Protocol):
    """A function that can leave its accelerator and come back to it (functions/server/agent.py). Between calls, in the
    thread of the calls; until `unpark` it gets none."""

    def park(self) -> int | None:
        """Leaves nothing on an accelerator beyond the process's context, and on a CPU no weights in private memory: all
        that it holds lies in pinned or mapped host memory. The number of the version that it holds; None: of none."""

    def unpark(self) -> None:
        """Back to where it was. Raises ReplicaBroken where what it holds is not what was parked: this process must
        answer no call."""


@runtime_checkable
class LoadsAhead(Protocol):
    """A function that can load before a call comes (functions/server/preload.py)."""

    def load_ahead(self, load: Load, context: Context) -> None:
        """Makes ready what `load` names, so that a call which wants it has to load nothing. In the thread of the calls.

        Raises as `call` does; a failure leaves the function as a failed call would.
        """
