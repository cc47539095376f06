"""Waiting for what will be so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], *, within_s: float = 100) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"not so within {within_s:g} s"
        time.sleep(0.01)


async def eventually(condition: Callable[[], bool]) -> None:
    """Without a bound of its own: the test has one."""
    while not condition():
        await asyncio.sleep(0.01)
