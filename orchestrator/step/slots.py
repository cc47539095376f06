"""Calls of one function that take what is ready as it comes, at most so many at a time.

A slot is a replica's worth of calls: while it waits its replica lingers, for at most as long as it would take to start
another one; then it goes (planner/episodes.py says why). What is ready goes to the replica that has waited for least,
so that the others age; where none waits, to one at work (`joins`) or to another one.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from orchestrator.base.clock import now_s
from orchestrator.calls.fleet import Stage

T = TypeVar("T")
START_S = 2.0
"""Of a replica, until one was seen to start."""


@dataclass(eq=False)
class _Waiting:
    lingers: bool
    event: asyncio.Event = field(default_factory=asyncio.Event)


class Slots(Generic[T]):
    """`stage` is open and not called by anybody else."""

    def __init__(
        self, stage: Stage, count: int, take: Callable[[list[T]], Sequence[T]],
        work: Callable[[Sequence[T]], Awaitable[None]], *,
        stays_s: Callable[[float], float | None] = lambda start_s: start_s, joins: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`take`: removes from what is ready what one call is to do; `work`: does it. `stays_s`: how long a replica
        waits, by what a start takes (None: to the end); `joins`: whether what is ready is left to those at work."""
        self._stage, self._count, self._take, self._work = stage, count, take, work
        self._stays_s, self._joins = stays_s, joins
        self.ready: list[T] = []
        self.changed = asyncio.Event()
        """Set when `ready` has changed."""
        self._waiting: list[_Waiting] = []
        self.held = 0
        """Replicas."""
        self._ended = False
        self.let_go = 0
        """How often a replica went because nothing was ready for it, for long,"""
        self.let_go_s = 0.0
        """and how long slots were without theirs since, in all."""
        stage.more = False

    def put(self, item: T) -> None:
        self.ready.append(item)
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        lingering = [waiting for waiting in self._waiting if waiting.lingers]
        if lingering or (self._waiting and not self._joins()):
            chosen = lingering[-1] if lingering else self._waiting[0]
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
        stage, holds = self._stage, False
        gone_s: float | None = None
        try:
            while not self._ended:
                if self.ready and (holds or not self._joins()):
                    items = self._take(self.ready)
                    if self.ready:
                        self._wake()
                    if not holds:
                        holds, self.held, stage.at_least = True, self.held + 1, stage.at_least + 1
                        self.let_go_s += 0.0 if gone_s is None else now_s() - gone_s
                    await self._work(items)
                elif not holds:
                    await self._called(_Waiting(lingers=False), None)
                elif not await self._called(_Waiting(lingers=True), self._stays_s(start_s(stage))):
                    holds, gone_s, self.held, stage.at_least = False, now_s(), self.held - 1, stage.at_least - 1
                    self.let_go += 1
                    await stage.fleet.settle(stage.function)
        finally:
            stage.at_least -= holds
            self.let_go_s += 0.0 if holds or gone_s is None else now_s() - gone_s

    async def _called(self, waiting: _Waiting, limit_s: float | None) -> bool:
        if self._ended:
            return True
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(limit_s):
                await waiting.event.wait()
        except TimeoutError:
            if waiting not in self._waiting:  # called in the same moment
                return True
            self._waiting.remove(waiting)
            return False
        return True


def start_s(stage: Stage) -> float:
    """What a replica takes to start, as seen in this stage."""
    starts = [call.start_s + call.stats.get("load_s", 0.0) for call in stage.observations if call.cold]
    return statistics.median(starts) if starts else START_S
