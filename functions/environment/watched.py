"""Episodes side by side, each in a thread, none for longer than the limit.

A thread that hangs cannot be ended: its episode is given up, another thread takes its place, and the replica ends
itself after the call (function.py).
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
LOOK_S = 0.2


class Watched(Generic[T, R]):
    """Runs `work(item, timed)` for all items; `timed()` begins the limit anew."""

    def __init__(
        self, work: Callable[[T, Callable[[], None]], R], items: Sequence[T], *, threads: int, limit_s: float
    ) -> None:
        self._work, self._items, self._limit_s = work, items, limit_s
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, R | BaseException]] = queue.SimpleQueue()
        self._since_s: dict[int, float] = {}
        """Of the items at work, by their number."""
        self.hung = 0
        for number in range(len(items)):
            self._left.put(number)
        for _ in range(min(threads, len(items))):
            self._start()

    def results(self, tick: Callable[[], None]) -> Iterator[tuple[T, R | None]]:
        """(item, result) as they end; None for one that took too long. Raises what the work raises. `tick` is called a
        few times a second, and may raise."""
        count = len(self._items)
        while count:
            tick()
            for number in self._too_long():
                self.hung += 1
                count -= 1
                self._start()
                yield self._items[number], None
            try:
                number, result = self._ended.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if self._since_s.pop(number, None) is None:
                continue  # given up before
            if isinstance(result, BaseException):
                raise result
            count -= 1
            yield self._items[number], result

    def more(self) -> bool:
        """Whether further results are there already."""
        return not self._ended.empty()

    def _too_long(self) -> list[int]:
        late_s = time.monotonic() - self._limit_s
        late = [number for number, since_s in list(self._since_s.items()) if since_s < late_s]
        return [number for number in late if self._since_s.pop(number, None) is not None]

    def _start(self) -> None:
        threading.Thread(target=self._run, name="episode", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                number = self._left.get_nowait()
            except queue.Empty:
                return
            self._since_s[number] = time.monotonic()

            def timed(number: int = number) -> None:
                if number in self._since_s:
                    self._since_s[number] = time.monotonic()

            try:
                result: R | BaseException = self._work(self._items[number], timed)
            except BaseException as error:
                result = error
            self._ended.put((number, result))
