"""Calls of one function that take what is ready as it comes, at most so many at a time.

A slot is a replica's worth of calls: while it waits its replica lingers, for as long as it would take to start another
one; then it goes. (So an idle replica never costs more than twice what the best decision would have: the ski-rental
rule, Karlin et al., "Competitive snoopy caching", Algorithmica 1988.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from orchestrator.calls.fleet import Stage

T = TypeVar("T")
START_S = 2.0
"""Of a replica, until one was seen to start."""


@dataclass(eq=False)
class _Waiting:
    event: asyncio.Event = field(default_factory=asyncio.Event)
    lingers: bool = True


class Slots(Generic[T]):
    """`stage` is open and not called by anybody else."""

    def __init__(
        self,
        stage: Stage,
        count: int,
        take: Callable[[list[T]], Sequence[T]],
        work: Callable[[Sequence[T]], Awaitable[None]],
    ) -> None:
        """`take`: removes from what is ready what one call is to do; `work`: does it."""
        self._stage, self._count, self._take, self._work = stage, count, take, work
        self._ready: list[T] = []
        self._waiting: list[_Waiting] = []
        self._ended = False
        self.let_go = 0
        """How often a replica went because nothing was ready for it, for long."""
        stage.more = False

    def put(self, item: T) -> None:
        self._ready.append(item)
        if self._waiting:  # whose replica is there, first
            chosen = next((w for w in self._waiting if w.lingers), self._waiting[0])
            self._waiting.remove(chosen)
            chosen.event.set()

    def end(self) -> None:
        """Nothing more will be ready."""
        self._ended = True
        for waiting in self._waiting:
            waiting.event.set()
        self._waiting.clear()

    async def run(self) -> None:
        """Until the end. The first call that fails ends the others."""
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._count):
                slots.create_task(self._slot())

    async def _slot(self) -> None:
        begun = False
        while not self._ended:
            if self._ready:
                begun = True
                await self._work(self._take(self._ready))
            else:
                await self._wait(lingers=begun)

    async def _wait(self, *, lingers: bool) -> None:
        waiting = _Waiting(lingers=lingers)
        self._waiting.append(waiting)
        stage = self._stage
        if lingers:
            stage.lingering += 1
            try:
                async with asyncio.timeout(self._linger_s()):
                    await waiting.event.wait()
            except TimeoutError:
                waiting.lingers = False
            finally:
                stage.lingering -= 1
            if waiting.lingers:
                return
            self.let_go += 1
            await stage.fleet.settle(stage.function)
        await waiting.event.wait()

    def _linger_s(self) -> float:
        starts = [call.start_s + call.stats.get("load_s", 0.0) for call in self._stage.observations if call.cold]
        return max(starts, default=START_S)
