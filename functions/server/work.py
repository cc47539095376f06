"""The main thread of a replica: it loads the function, then runs one thing after the other, calls mostly.

HTTP thread -- Open, park, unpark, None (leave) --> queue --> main thread
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from functions.base.logs import About, finish_printed
from functions.base.wire import ALIVE
from functions.call import userfile
from functions.call.function import Function, Parks
from functions.exchange.base import Exchange, Unavailable
from functions.exchange.open import open_exchange
from functions.server import kinds
from functions.server.preload import Ahead
from functions.server.settings import Settings

if TYPE_CHECKING:
    import asyncio

    from functions.server.app import Open, Server

LOOK_S = 5.0
"""How often a parked process looks whether its job still has an orchestrator."""

log = logging.getLogger(__name__)

ASLEEP_EXIT = 71
"""Of a process that was parked and does not come back as it was."""


class Work:
    """`server` is the HTTP thread's side; `run` serves until it submits None."""

    def __init__(self, settings: Settings, scratch: str, about: About) -> None:
        self.settings, self.scratch, self.about = settings, scratch, about
        self.place = settings.exchange, settings.job
        self.queue: queue.SimpleQueue[Open | Callable[[], None] | None] = queue.SimpleQueue()
        self.parked = False
        self.waits = threading.Event()
        """The main thread has nothing to do, and loads nothing."""
        self._made: Function | None = None
        self._opened: Exchange | None = None
        self._ahead: Ahead | None = None
        """What was loaded ahead of the first call, until that has come."""

    def run(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        userfile.carried_by(lambda key: self.exchange().durable.get(key))
        with contextlib.suppress(Exception):  # the calls say what is wrong
            if self._made is None:
                self.function()
        self.load_ahead(server)
        while (it := self.next()) is not None:
            self.waits.clear()
            if callable(it):
                it()
                continue
            attempt, call = it.attempt, it.attempt.call
            if self._ahead is not None:
                self._ahead.tell(attempt, it.since_s)
                self._ahead = None
            trace = {"trace": attempt.meter.trace_id} if call.trace else {}
            self.about.call = {"step": call.step, "call": call.id} | trace
            log.info("%s begins", call.operation)
            outcome = attempt.run(self.function, self.exchange, self.scratch, self.place)
            finish_printed()
            log.info("%s ends: %s after %.3f s", call.operation, outcome, attempt.meter.now_s())
            self.about.call = {}
            loop.call_soon_threadsafe(server.ended, it, outcome)

    def next(self) -> Open | Callable[[], None] | None:
        """What is to be done; a parked process whose job has no orchestrator any more ends while it waits."""
        self.waits.set()
        while self.parked and self.settings.leased:
            with contextlib.suppress(queue.Empty):
                return self.queue.get(timeout=LOOK_S)
            with contextlib.suppress(Unavailable):
                if not self.exchange().wait(ALIVE, 0):
                    log.info("parked, and the job's orchestrator is gone: exit")
                    return None
        return self.queue.get()

    def function(self) -> Function:
        if self._made is None:
            self._made = kinds.build(self.settings.kind, self.settings.options)
        return self._made

    def exchange(self) -> Exchange:
        if self._opened is None:
            self._opened = open_exchange(*self.place)
        return self._opened

    def load_ahead(self, server: Server) -> None:
        """Before the first call of a life comes."""
        self._ahead = ahead = Ahead()
        server.loading = True
        if self._made is not None and not server.draining and self.queue.empty():
            name = str(self.about.process["function"])
            ahead.load(self._made, self.exchange, name, self.scratch, self.queue.empty, self.place)
        server.loading = False
        finish_printed()
        if ahead.broken:  # a call that has come is lost, and made again elsewhere
            server.leave()

    def park(self) -> int | None:
        """The version that lies in the function now. Raises ValueError for one that cannot park."""
        if not isinstance(self._made, Parks):
            raise ValueError(f"{type(self._made).__name__} cannot park")
        begun_s = time.monotonic()
        version = self._made.park()
        self.parked = True
        log.info("parked after %.3f s", time.monotonic() - begun_s)
        return version

    def unpark(self, server: Server) -> None:
        """Back, as another replica of the function. A process that does not come back as it was ends, and says why."""
        begun_s = time.monotonic()
        self.parked = False
        try:
            assert isinstance(self._made, Parks)
            self._made.unpark()
        except Exception as error:
            finish_printed()
            log.error("%s", " ".join(str(error).split()) or userfile.describe(error))
            os._exit(ASLEEP_EXIT)
        log.info("unparked after %.3f s", time.monotonic() - begun_s)
        self.load_ahead(server)
