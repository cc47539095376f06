"""A time limit on code that is not ours."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimit(BaseException):
    """The limit has passed. No Exception: `except Exception: return 0` in a scorer must not make a score of it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimit in the block when it takes longer, and at its end when the block has swallowed that.

    By SIGALRM: it ends loops, sleeps, reads and regular expressions (`re` looks at signals as it goes); other C code
    ends when it returns. Main thread only, where functions run. A timer that was set before goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("time_limit works in the main thread only")
    passed, inside = False, True

    def pass_(_number: int, _frame: FrameType | None) -> None:
        nonlocal passed
        if inside:
            passed = True
            raise TimeLimit

    begun_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, pass_)
    before_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)  # again, should the first be swallowed
    try:
        try:
            yield
        finally:
            inside = False
    finally:
        inside = False  # once more: the alarm may have come before the line above
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before_s:
            left_s = max(1e-3, before_s - (time.monotonic() - begun_s))
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
    if passed:
        raise TimeLimit
