"""A cluster in virtual time: the real loop calls it, its functions' work is a latency model (orchestrator/simulation).

    scale --> starting (waits for free GPUs, then a cold start) --> idle --call--> busy --> idle --> gone

Serverless: a replica takes its GPUs from the pool when it starts, and they are paid for until it is gone. Colocated:
every function has a place on the same GPUs, which are held and paid for from deploy to close; a call waits until all
GPUs of its replica are free of other functions' calls (weights stay resident: a place costs nothing more).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from functions.base.wire import Call, Event
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError, Replica, ReplicaState, Usage
from orchestrator.simulation.functions import Held, Model, hinted
from orchestrator.simulation.memory import MemoryExchange
from orchestrator.simulation.perform import perform


@dataclass(frozen=True)
class Pool:
    """GPUs that all functions share. `colocated`: held for the whole job, functions take turns on them."""

    gpus: int
    colocated: bool = False


@dataclass(frozen=True)
class Span:
    """A call as it was made, for pictures. `stop_s` is None while it runs."""

    function: str
    replica: str
    operation: str
    start_s: float
    stop_s: float | None


@dataclass(eq=False)
class _Replica:
    function: str
    name: str
    place: int
    state: ReplicaState
    since_s: float
    held: Held
    started_s: float | None = None
    """None while it waits for GPUs."""
    stopped_s: float | None = None
    busy_s: float = 0.0
    starting: asyncio.Task[None] | None = None
    events: asyncio.Queue[Event | None] | None = None
    """Of the call that is open; None ends it as lost."""


@dataclass(eq=False)
class _Deployed:
    spec: FunctionSpec
    model: Model
    wanted: int = 0
    replicas: list[_Replica] = field(default_factory=list)
    waiters: deque[asyncio.Future[_Replica]] = field(default_factory=deque)


class SimulatedPlatform:
    """See Platform. `models` says what each function's work takes; `pool` None: as many GPUs as are asked for."""

    def __init__(self, models: Mapping[str, Model], exchange: MemoryExchange, *, pool: Pool | None = None) -> None:
        self._models, self._exchange, self._pool = models, exchange, pool
        self._functions: dict[str, _Deployed] = {}
        self._lives: list[_Replica] = []
        self._free = 0 if pool is None else pool.gpus
        self._queue: deque[_Replica] = deque()
        self._taken: set[int] = set()
        self._numbers = count()
        self._deployed_s: float | None = None
        self._closed_s: float | None = None
        self.spans: list[Span] = []

    async def deploy(self, specs: Sequence[FunctionSpec]) -> None:
        for spec in specs:
            if spec.name not in self._models:
                raise PlatformError(
                    f"function {spec.name!r} has no model of its work (there is {sorted(self._models)})"
                )
            if self._pool is not None and spec.gpus > self._pool.gpus:
                raise PlatformError(f"{spec.name}: a replica needs {spec.gpus} GPUs, the pool has {self._pool.gpus}")
        await self._all_gone()
        self._functions = {spec.name: _Deployed(spec, self._models[spec.name]) for spec in specs}
        self._deployed_s = _now_s() if self._deployed_s is None else self._deployed_s

    async def scale(self, function: str, replicas: int) -> None:
        deployed = self._deployed(function)
        if not 0 <= replicas <= deployed.spec.max_replicas:
            raise PlatformError(f"{function}: {replicas} replicas asked for (wants 0..{deployed.spec.max_replicas})")
        deployed.wanted = replicas
        self._settle(deployed)

    async def call(self, function: str, call: Call) -> AsyncIterator[Event]:
        deployed = self._deployed(function)
        replica = await self._acquire(deployed)
        start_s = _now_s()
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        replica.events = events
        work = asyncio.create_task(_pump(perform(call, deployed.model, replica.held, self._exchange), events))
        try:
            while (event := await events.get()) is not None:
                yield event
                if event.kind in ("done", "error"):
                    return
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                raise error
            raise CallLost(f"{replica.name} is gone, with call {call.id}")
        finally:
            work.cancel()
            replica.events = None
            self.spans.append(Span(function, replica.name, call.operation, start_s, _now_s()))
            self._release(deployed, replica, start_s)

    def replicas(self) -> list[Replica]:
        return [Replica(r.function, r.name, r.state, r.since_s) for d in self._functions.values() for r in d.replicas]

    def usage(self) -> list[Usage]:
        """Replicas that still wait for GPUs are not paid for. In a colocated pool `gpu_s` is what is paid."""
        return [
            Usage(r.function, r.name, r.started_s, r.stopped_s, r.busy_s)
            for r in self._lives
            if r.started_s is not None
        ]

    async def close(self) -> None:
        await self._all_gone()
        self._closed_s = _now_s() if self._closed_s is None else self._closed_s

    def gpu_s(self) -> float:
        """GPU-seconds paid for until now."""
        if self._pool is not None and self._pool.colocated:
            if self._deployed_s is None:
                return 0.0
            return self._pool.gpus * ((self._closed_s or _now_s()) - self._deployed_s)
        return sum(
            self._functions[u.function].spec.gpus
            * ((u.stopped_s if u.stopped_s is not None else _now_s()) - u.started_s)
            for u in self.usage()
        )

    def kill(self, name: str) -> None:
        """A replica dies (a node fails): its call is lost; another one is started while it is wanted."""
        for deployed in self._functions.values():
            for replica in deployed.replicas:
                if replica.name == name:
                    self._stop(deployed, replica)
                    self._settle(deployed)
                    return
        raise KeyError(f"no replica {name!r}")

    # --- how -----------------------------------------------------------------------------------------------------

    def _deployed(self, function: str) -> _Deployed:
        if function not in self._functions:
            raise PlatformError(f"function {function!r} is not deployed (there is {sorted(self._functions)})")
        return self._functions[function]

    def _settle(self, deployed: _Deployed) -> None:
        """Replicas to as many as are wanted: idle ones go first, then starting ones; busy ones when they are done."""
        excess = len(deployed.replicas) - deployed.wanted
        for going in ("idle", "starting"):
            for replica in [r for r in reversed(deployed.replicas) if r.state == going][: max(0, excess)]:
                self._stop(deployed, replica)
                excess -= 1
        busy = [r for r in deployed.replicas if r.state in ("busy", "draining")]
        for k, replica in enumerate(busy):
            state: ReplicaState = "draining" if k < excess else "busy"
            if replica.state != state:
                replica.state, replica.since_s = state, _now_s()
        for _ in range(-excess):
            self._start(deployed)

    def _start(self, deployed: _Deployed) -> None:
        taken = {r.place for r in deployed.replicas}
        place = next(k for k in count() if k not in taken)
        name = f"{deployed.spec.name}-{next(self._numbers)}"
        replica = _Replica(deployed.spec.name, name, place, "starting", _now_s(), Held(name))
        deployed.replicas.append(replica)
        self._lives.append(replica)
        self._queue.append(replica)
        self._admit()

    def _admit(self) -> None:
        """Gives free GPUs to the replicas that wait for them, in order: none overtakes one that needs more."""
        limited = self._pool is not None and not self._pool.colocated
        for replica in list(self._queue):
            deployed = self._functions[replica.function]
            if limited and deployed.spec.gpus > self._free:
                return
            self._queue.popleft()
            self._free -= deployed.spec.gpus if limited else 0
            replica.started_s = _now_s()
            replica.starting = asyncio.create_task(self._cold_start(deployed, replica))

    async def _cold_start(self, deployed: _Deployed, replica: _Replica) -> None:
        await asyncio.sleep(deployed.model.start_s)
        replica.held.load_ahead(hinted(deployed.spec.name, self._exchange), deployed.model, _now_s())
        replica.state, replica.since_s = "idle", _now_s()
        self._dispatch()

    def _stop(self, deployed: _Deployed, replica: _Replica) -> None:
        deployed.replicas.remove(replica)
        if replica.starting is not None:
            replica.starting.cancel()
        if replica.events is not None:
            replica.events.put_nowait(None)
        if replica in self._queue:
            self._queue.remove(replica)
            return
        replica.stopped_s = _now_s()
        if self._pool is not None and not self._pool.colocated:
            self._free += deployed.spec.gpus
            self._admit()

    async def _acquire(self, deployed: _Deployed) -> _Replica:
        waiter: asyncio.Future[_Replica] = asyncio.get_running_loop().create_future()
        deployed.waiters.append(waiter)
        self._dispatch()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._release(deployed, waiter.result(), _now_s())
            raise

    def _dispatch(self) -> None:
        """Waiting calls to idle replicas whose GPUs are free."""
        for deployed in self._functions.values():
            for replica in deployed.replicas:
                while deployed.waiters and deployed.waiters[0].done():
                    deployed.waiters.popleft()
                if not deployed.waiters:
                    break
                gpus = self._gpus(deployed, replica)
                if replica.state == "idle" and not (gpus & self._taken):
                    self._taken |= gpus
                    replica.state, replica.since_s = "busy", _now_s()
                    deployed.waiters.popleft().set_result(replica)

    def _release(self, deployed: _Deployed, replica: _Replica, start_s: float) -> None:
        replica.busy_s += _now_s() - start_s
        self._taken -= self._gpus(deployed, replica)
        if replica in deployed.replicas:
            replica.state, replica.since_s = "idle", _now_s()
            if len(deployed.replicas) > deployed.wanted:
                self._stop(deployed, replica)
        self._dispatch()

    def _gpus(self, deployed: _Deployed, replica: _Replica) -> set[int]:
        """In a colocated pool: the GPUs of the replica's place, which other functions' places overlap."""
        if self._pool is None or not self._pool.colocated:
            return set()
        first = replica.place * deployed.spec.gpus
        return {k % self._pool.gpus for k in range(first, first + deployed.spec.gpus)}

    async def _all_gone(self) -> None:
        for deployed in self._functions.values():
            deployed.wanted = 0
            for replica in list(deployed.replicas):
                self._stop(deployed, replica)
            while deployed.waiters:
                waiter = deployed.waiters.popleft()
                if not waiter.done():
                    waiter.set_exception(CallLost(f"{deployed.spec.name}: the platform was closed"))
        await asyncio.sleep(0)


async def _pump(source: AsyncGenerator[Event, None], events: asyncio.Queue[Event | None]) -> None:
    try:
        async for event in source:
            events.put_nowait(event)
    except Exception:
        events.put_nowait(None)
        raise


def _now_s() -> float:
    return asyncio.get_running_loop().time()
