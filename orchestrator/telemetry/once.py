"""One line from a thread that a job does not wait for: that it has failed, and the job goes on without."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


class Once:
    """Made in the event loop's thread, in which `note` is called, with the first message only."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._loop, self._lock = note, asyncio.get_running_loop(), threading.Lock()
        self._message: str | None = None
        self._noted = False

    def tell(self, message: str) -> None:
        """From any thread."""
        with self._lock:
            if self._message is not None:
                return
            self._message = message
        with suppress(RuntimeError):  # the loop is over: `settle` notes it
            self._loop.call_soon_threadsafe(self.settle)

    def settle(self) -> None:
        """In the loop's thread: notes what was told and could not be noted yet."""
        if self._message is not None and not self._noted:
            self._noted = True
            self._note(self._message)
