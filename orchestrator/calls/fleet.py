"""Replicas follow the work: a function's are asked for when a stage opens, and let go as its calls end.

async with fleet.stage("reward", replicas=2) as stage:     2 wanted from the first call on
    async for event in stage.call(call): ...
    stage.no_more()                                        from here on, no more replicas than open calls
                                                           closed: none, unless the function is kept
While something is away that the job needs (base/outages.py), what is idle is let go: no more replicas than calls that
work, none for those that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span

from functions.base.wire import Call, Event
from functions.call.parallel import DATA_PARALLEL, Parallel
from orchestrator.base.outages import Outages
from orchestrator.calls.gang import invoke_gang
from orchestrator.calls.invoke import Invoker
from orchestrator.planner.base import CallObservation
from orchestrator.platforms.base import Platform


@dataclass
class Stage:
    """One use of a function. What it wants is what `Fleet` adds up over the stages that are open."""

    fleet: Fleet
    function: str
    replicas: int
    began_s: float | None = None
    """When its first call was made."""
    open_calls: int = 0
    idle_calls: int = 0
    """Of the open calls, those that wait for what is away."""
    more: bool = True
    at_least: int = 0
    """Replicas that stay for calls that are not made yet, after `no_more` or between two calls (step/slots.py)."""
    observations: list[CallObservation] = field(default_factory=list)
    span: Span = INVALID_SPAN
    """Its span in the trace, from its first call on."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """No call follows."""

    @property
    def wanted(self) -> int:
        """Nothing before the first call; `replicas` while more calls may come; then one for each open call."""
        if self.began_s is None:
            return 0
        if self.fleet.outages.long:
            return min(self.replicas, self.open_calls - self.idle_calls)
        return self.replicas if self.more else min(self.replicas, max(self.open_calls, self.at_least))

    def expect(self, calls: int, *, then: int) -> None:
        """So many calls follow, until `no_more`; `then` replicas stay for calls that may come after it."""
        self.more, self.replicas, self.at_least = True, min(self.replicas, calls), then

    async def no_more(self) -> None:
        """No call will be added: replicas go as the open calls end."""
        self.more = False
        await self.fleet.settle(self.function)

    async def call(self, call: Call) -> AsyncIterator[Event]:
        """The call's events, exactly once each, over as many attempts as it takes. Raises CallFailed."""
        async with self._open(1):
            observe = self.observations.append
            async for event in self.fleet.invoker.invoke(
                self.function, call, observe=observe, within=self.span, idle=lambda: self._idle(1)
            ):
                yield event

    async def gang(self, call: Call, parallel: Parallel = DATA_PARALLEL) -> Event:
        """The `done` of `call` as a gang of all the stage's replicas, in this mesh, however many attempts it takes.

        Raises CallFailed.
        """
        async with self._open(self.replicas):
            return await invoke_gang(
                self.fleet.invoker, self.function, call, self.replicas, parallel, observe=self.observations.append,
                within=self.span, idle=lambda: self._idle(self.replicas),
            )  # fmt: skip

    @asynccontextmanager
    async def _open(self, calls: int) -> AsyncIterator[None]:
        if self.began_s is None:
            self.began_s = asyncio.get_running_loop().time()
            self.span = self.fleet.invoker.tracing.begin(self.function, {"rlhf.replicas": self.replicas})
            self.fleet.begin(self.function)
        self.open_calls += calls
        await self.fleet.settle(self.function)
        try:
            yield
        finally:
            self.open_calls -= calls
            await asyncio.shield(self.fleet.settle(self.function))

    @asynccontextmanager
    async def _idle(self, calls: int) -> AsyncIterator[None]:
        """So many open calls wait: they want no replica once that has gone on for a while, but one as they go on."""
        self.idle_calls += calls
        await self.fleet.settle(self.function)
        try:
            yield
        finally:
            self.idle_calls -= calls
            await asyncio.shield(self.fleet.settle(self.function))


class Fleet:
    """Adds up what the stages want and scales the platform's functions to that."""

    def __init__(self, platform: Platform, invoker: Invoker) -> None:
        self.platform = platform
        self.invoker = invoker
        self._stages: dict[str, list[Stage]] = {}
        self._kept: dict[str, int] = {}
        self._warm: dict[str, int] = {}
        """Started ahead of their first call in this step,"""
        self._warm_next: dict[str, int] = {}
        """and in the next."""
        self._begun: set[str] = set()
        self._scaled: dict[str, int] = {}
        self._scaling: dict[str, asyncio.Lock] = {}
        invoker.outages.changed = self._settle_all

    @property
    def outages(self) -> Outages:
        return self.invoker.outages

    @asynccontextmanager
    async def stage(self, function: str, replicas: int) -> AsyncIterator[Stage]:
        stage = Stage(self, function, replicas)
        self._stages.setdefault(function, []).append(stage)
        try:
            yield stage
        finally:
            stage.span.end()
            stage.ended.set()
            self._stages[function].remove(stage)
            await asyncio.shield(self.settle(function))

    async def prewarm(self, function: str, replicas: int, *, next_step: bool = False) -> None:
        """Starts replicas ahead of the function's first call, in this step or the next; too late, it does nothing."""
        if next_step:
            self._warm_next[function] = replicas
        elif function not in self._begun:
            self._warm[function] = replicas
        await asyncio.shield(self.settle(function))

    def begin(self, function: str) -> None:
        """The function's first call of a stage: from here on the stage says what is wanted."""
        self._begun.add(function)
        self._warm.pop(function, None)

    async def not_needed(self, function: str) -> None:
        """The function is not called in this step after all: what was started ahead goes, what would be is not."""
        self.begin(function)
        await self.settle(function)

    def at_work(self) -> list[str]:
        """The functions with calls in the making or open, in the order in which they began."""
        begun = [(s.began_s, s.function) for stages in self._stages.values() for s in stages if s.began_s is not None]
        return list(dict.fromkeys(function for _, function in sorted(begun)))

    async def keep(self, functions: Iterable[str], replicas: Callable[[str], int]) -> None:
        """From now on these functions' replicas stay when they are idle; all others go, but those prewarmed for now."""
        self._warm, self._warm_next = self._warm_next, {}
        self._begun.clear()
        self._kept = {name: replicas(name) for name in functions}
        for name in {*self._scaled, *self._kept}:
            await self.settle(name)

    async def settle(self, function: str) -> None:
        """Asks the platform for as many replicas as are wanted, if that has changed; returns when it has been asked."""
        async with self._scaling.setdefault(function, asyncio.Lock()):
            asked = sum(stage.wanted for stage in self._stages.get(function, ()))
            limit = max((stage.replicas for stage in self._stages.get(function, ())), default=0)
            held = () if self.outages.long else (self._kept, self._warm, self._warm_next)
            wanted = max(min(asked, limit), *(replicas.get(function, 0) for replicas in held), 0)
            if self._scaled.get(function, 0) != wanted:
                self._scaled[function] = wanted
                await self.platform.scale(function, wanted)

    async def _settle_all(self) -> None:
        for name in {*self._scaled, *self._kept, *self._stages}:
            await self.settle(name)
