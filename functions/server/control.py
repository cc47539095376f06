"""A replica's end of the socket to its agent (agent.py): told to park and to come back, it says when it has."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from functions.base.logs import About
from functions.server.forked import write_to
from functions.server.lines import Lines
from functions.server.work import Work

if TYPE_CHECKING:
    from functions.server.app import Server


WAIT_S = 0.5
"""How long a main thread whose call has ended may take to notice it: one that takes longer loads."""


class Control:
    """Heard in the HTTP thread. `parked` processes take no calls."""

    def __init__(self, end: socket.socket, server: Server, work: Work, about: About) -> None:
        self._lines, self._server, self._work, self._about = Lines(end), server, work, about
        self._tasks: set[asyncio.Task[None]] = set()
        self._parked_at_s = 0.0

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self._lines.socket, self._hear, loop)

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        lines = self._lines.read()
        if lines is None:  # the agent is gone, and the keeper is about to say so
            loop.remove_reader(self._lines.socket)
        for message in lines or ():
            if "park" in message:
                task = loop.create_task(self._park())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._unpark(**message["unpark"])

    async def _park(self) -> None:
        if not (await self._server.rests() and await asyncio.to_thread(self._work.waits.wait, WAIT_S)):
            self._lines.tell(refused="a call is open, it loads for nobody, or it is being stopped")
            return
        self._server.parked, self._parked_at_s = True, time.monotonic()
        self._work.queue.put(self._answered(self._work.park))

    def _answered(self, park: Callable[[], int | None]) -> Callable[[], None]:
        def answer() -> None:
            told: dict[str, Any]
            try:
                told = {"parked": {"version": park()}}
            except Exception as error:
                told = {"refused": " ".join(str(error).split()) or type(error).__name__}
            self._lines.tell(**told)

        return answer

    def _unpark(self, name: str, log: str) -> None:
        """From here on it is replica `name`, which takes calls; its function comes back before the first of them."""
        write_to(log)
        self._about.process = {**self._about.process, "replica": name}
        self._server.renamed(replace(self._server.settings, name=name))
        self._work.queue.put(lambda: self._work.unpark(self._server))
        self._server.parked, self._server.parked_s = False, time.monotonic() - self._parked_at_s
        self._lines.tell(awake={})
