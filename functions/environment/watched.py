"""Episodes side by side, each in a thread, none for longer than the limit.

What a call leaves behind (it was cut, or its caller is gone) goes on in its thread, and the call that asks for it again
finds it there. A thread that hangs cannot be ended: its episode is given up, another thread takes its place, and the
replica ends itself after the call (function.py).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
LOOK_S = 0.05
"""Between looks at what takes too long, and at whether the call is cut."""


class Watched(Generic[T, R]):
    """Runs `work(item, timed)`; `timed()` begins the limit anew. `key` says which items are one."""

    def __init__(self, work: Callable[[T, Callable[[], None]], R], key: Callable[[T], str]) -> None:
        self._work, self._key = work, key
        self._left: deque[T] = deque()
        self._since_s: dict[str, float] = {}
        """Of the items at work."""
        self._results: dict[str, R | BaseException] = {}
        """Of items at work before that have ended."""
        self._changed = threading.Condition()
        self.hung = 0

    def results(
        self, items: Sequence[T], tick: Callable[[], bool], *, threads: int, limit_s: float
    ) -> Iterator[list[tuple[T, R | None]]]:
        """(item, result) of those that have ended, as they do; None for one that took too long. Until all have, or
        `tick` says that it is enough: it is called a few times a second, and may raise. Raises what the work raises."""
        wanted = {self._key(item): item for item in items}
        with self._changed:
            self._results = {key: result for key, result in self._results.items() if key in wanted}
            self._left = deque(i for k, i in wanted.items() if k not in self._since_s and k not in self._results)
            self._start(wanted, threads)
        while wanted and not tick():
            with self._changed:
                if not self._results:
                    self._changed.wait(LOOK_S)
                found: list[tuple[T, R | None]] = []
                for key in [key for key in wanted if key in self._results]:
                    result = self._results.pop(key)
                    if isinstance(result, BaseException):
                        raise result
                    found.append((wanted.pop(key), result))
                late_s = time.monotonic() - limit_s
                for key in [key for key in wanted if self._since_s.get(key, late_s) < late_s]:
                    del self._since_s[key]
                    self.hung += 1
                    found.append((wanted.pop(key), None))
                self._start(wanted, threads)
            if found:
                yield found

    def _start(self, wanted: Mapping[str, T], threads: int) -> None:
        while self._left and len(wanted.keys() & self._since_s.keys()) < threads:
            item = self._left.popleft()
            self._since_s[self._key(item)] = time.monotonic()
            threading.Thread(target=self._run, args=(item,), name="episode", daemon=True).start()

    def _run(self, item: T) -> None:
        key = self._key(item)

        def timed() -> None:
            with self._changed:
                if key in self._since_s:
                    self._since_s[key] = time.monotonic()

        try:
            result: R | BaseException = self._work(item, timed)
        except BaseException as error:
            result = error
        with self._changed:
            if self._since_s.pop(key, None) is not None:  # else it was given up before
                self._results[key] = result
                self._changed.notify()
