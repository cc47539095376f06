"""What a job depends on and cannot reach is waited for, in this one place: a store, the cluster's API, a webhook, DNS.

    result = await outages.bridge(action)        `action` again and again while it raises Away

    s3://bucket  --- away ------------------------------ back --->
    bridge 1         |  pauses, growing to MAX_S  |  result
    bridge 2             |  pauses                   |  result
    told             "waiting for s3://bucket: ..."  "s3://bucket is back after 12 s"

However many wait for the same thing, it is told once. Nothing is held meanwhile that costs money: who holds replicas
hears of it by `changed` (calls/fleet.py). Each waits for `limit_s` at most (limits.outage_s), then RunError.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.base.clock import now_s
from orchestrator.base.errors import Away, RunError

LIMIT_S = 1800.0
BASE_S = 0.25
MAX_S = 30.0
"""Pause k is BASE_S * 2^k, at most MAX_S, times a random factor in [1/2, 1]."""
LONG_S = 5.0
"""From here on idle replicas are not kept for the end of it: a short one costs nobody a cold start."""

T = TypeVar("T")


@dataclass
class Outage:
    since_s: float
    waiting: int = 0
    long: bool = False
    back: bool = False
    """One of those who wait has got through."""


class Outages:
    """Of one execution of a job. `note` hears of each one's begin and end."""

    def __init__(
        self, limit_s: float = LIMIT_S, *, note: Callable[[str], None] = lambda _message: None, seed: int = 0
    ) -> None:
        self.limit_s, self.note = limit_s, note
        self.changed: Callable[[], Awaitable[None]] = _nobody
        """Called when `long` may have changed."""
        self.dice = random.Random(seed)
        self._open: dict[str, Outage] = {}

    @property
    def long(self) -> bool:
        """Whether something has been away for long enough to let go what is idle."""
        return any(outage.long for outage in self._open.values())

    def line(self) -> str:
        """`waiting for s3://bucket since 12 s`; empty when nothing is waited for."""
        at_s = now_s()
        lines = [f"waiting for {what} since {at_s - outage.since_s:.0f} s" for what, outage in self._open.items()]
        return "; ".join(lines)

    async def bridge(self, action: Callable[[], Awaitable[T]]) -> T:
        """What `action` returns, once nothing that it needs is away. Raises RunError after `limit_s`."""
        async with self.waiting() as wait:
            while True:
                try:
                    result = await action()
                except Away as away:
                    await wait.pause(away)
                else:
                    await wait.over()
                    return result

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Wait]:
        """For one who meets outages in the course of a longer work."""
        wait = Wait(self)
        try:
            yield wait
        finally:
            wait.leave(back=False)

    def enter(self, away: Away) -> Outage:
        if away.what not in self._open:
            self._open[away.what] = Outage(now_s())
            self.note(f"waiting for {away.what}, for up to {self.limit_s:g} s (limits.outage_s): {away}")
        outage = self._open[away.what]
        outage.waiting += 1
        return outage

    def leave(self, what: str, *, back: bool) -> None:
        outage = self._open[what]
        outage.waiting -= 1
        outage.back |= back
        if not outage.waiting:
            del self._open[what]
            if outage.back:
                self.note(f"{what} is back after {now_s() - outage.since_s:.0f} s")


class Wait:
    """One who waits: since when, and for what."""

    def __init__(self, outages: Outages) -> None:
        self._outages = outages
        self._since_s: float | None = None
        self._pauses = 0
        self._what = ""

    async def pause(self, away: Away) -> None:
        """Returns when it is worth another try. Raises RunError when that has gone on for too long."""
        outages, at_s = self._outages, now_s()
        since_s = self._since_s = at_s if self._since_s is None else self._since_s
        left_s = since_s + outages.limit_s - at_s
        if left_s <= 0:
            raise RunError(
                f"{away}; waited {outages.limit_s:g} s (limits.outage_s); what is committed is safe, mend it and run "
                "`rlhf-orchestrate resume`"
            ) from away
        if self._what != away.what:
            self.leave(back=True)
            self._outage, self._what = outages.enter(away), away.what
        if not self._outage.long and at_s >= self._outage.since_s + LONG_S:
            self._outage.long = True
            await outages.changed()
        pause_s = min(MAX_S, BASE_S * 2.0 ** min(self._pauses, 10)) * (1 - outages.dice.random() / 2)
        self._pauses += 1
        await asyncio.sleep(min(pause_s, left_s))

    async def until(self, away: Away, probe: Callable[[], Awaitable[None]]) -> None:
        """As `pause`, and on until `probe` raises Away no more."""
        while True:
            await self.pause(away)
            try:
                return await probe()
            except Away as again:
                away = again

    async def over(self) -> None:
        """It works again."""
        if self._since_s is not None:
            self._since_s, self._pauses = None, 0
            self.leave(back=True)
            await self._outages.changed()

    def leave(self, *, back: bool) -> None:
        if self._what:
            self._outages.leave(self._what, back=back)
            self._what = ""


async def _nobody() -> None:
    pass
