"""An event loop whose clock jumps: where a real one would wait for the next timer, time is set to it.

Nothing else changes: tasks run in the order in which they would run if their own work took no time at all. A loop that
waits for something that no timer will bring is dead, and says so instead of waiting forever.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
TICK_S = 1e-9
"""A timer that is due within it goes off now: whoever sets another one for the rest of it may wait for ever."""


class Deadlock(RuntimeError):
    """Every task waits, and no timer is set that could wake one."""


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at the real files without waiting, and tells the clock how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is None:
            raise Deadlock("virtual time stands still: all tasks wait and no timer is set (a thread? a lost wake-up?)")
        self.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
