"""A cluster in virtual time: the real loop calls it, its functions' work is a latency model (orchestrator/simulation).

    scale --> starting (waits for free GPUs, then a start) --> idle --call--> busy --> idle --> zero, or parked

Serverless: a replica takes its GPUs from the pool when it starts, and they are paid for until it is gone. What parks
leaves its GPUs a little later, and the function's next start takes it up with the versions that it holds. Turns: every
function has a place on the same GPUs, which are held and paid for; a call waits until all GPUs of its replica are
free of other functions' calls (weights stay resident: a place costs nothing more). A pool is colocated for the whole
job, or a plan says so from step to step (`take_turns`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from functions.base.wire import Call, Event
from orchestrator.base.clock import now_s
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError, Replica, Usage
from orchestrator.platforms.queue import Life, ReplicaQueue, deployed, usage
from orchestrator.simulation.functions import Held, Model, hinted
from orchestrator.simulation.memory import MemoryExchange
from orchestrator.simulation.perform import perform


@dataclass(frozen=True)
class Pool:
    """GPUs that all functions share. `colocated`: held from the beginning, functions take turns on them."""

    gpus: int
    colocated: bool = False


@dataclass(eq=False)
class _Replica(Life):
    """Started when it has its GPUs."""

    place: int = 0
    gpus: int = 0
    """That it has taken from the pool."""
    start_s: float = 0.0
    held: Held = field(default_factory=lambda: Held(""))
    starting: asyncio.Task[None] | None = None
    events: asyncio.Queue[Event | None] | None = None
    """Of the call that is open; None ends it as lost."""


class _Function(ReplicaQueue[_Replica]):
    def __init__(self, spec: FunctionSpec, model: Model, platform: SimulatedPlatform) -> None:
        super().__init__(spec)
        self.model, self.platform = model, platform
        self.parked: list[Held] = []
        """Processes without a GPU."""

    def start(self) -> _Replica:
        return self.platform.start(self)

    def stop(self, replica: _Replica) -> None:
        self.platform.end(self, replica)

    def fits(self, replica: _Replica) -> bool:
        return not self.platform.taken(self, replica)

    def next(self) -> list[_Replica]:
        """Those without a call that will take the calls that wait."""
        waiting = sum(not waiter.done() for waiter in self._waiters)
        return [replica for replica in self.replicas if replica.state == "idle"][:waiting]

    def hand_out(self) -> None:
        """Of all functions: what ends here may free GPUs for another one."""
        for function in self.platform.functions.values():
            super(_Function, function).hand_out()


class SimulatedPlatform:
    """See Platform. `models` says what each function's work takes; `pool` None: as many GPUs as are asked for."""

    def __init__(self, models: Mapping[str, Model], exchange: MemoryExchange, *, pool: Pool | None = None) -> None:
        self._models, self._exchange, self._pool = models, exchange, pool
        self._turns = pool.gpus if pool is not None and pool.colocated else 0
        """GPUs that are held for them; 0: functions do not take any."""
        self.functions: dict[str, _Function] = {}
        self._lives: list[_Replica] = []
        self._taken, self._paid_s, self._since_s = 0, 0.0, 0.0
        """GPUs that replicas have; GPU-seconds paid for until then."""
        self._queue: deque[_Replica] = deque()
        self._numbers = count()
        self._deployed_s: float | None = None
        self._closing_s: float | None = None
        self._closed_s: float | None = None

    async def deploy(self, specs: Sequence[FunctionSpec]) -> None:
        if self._closed_s is not None:
            raise PlatformError("the simulated platform is closed")
        for spec in specs:
            if spec.name not in self._models:
                raise PlatformError(
                    f"function {spec.name!r} has no model of its work (there is {sorted(self._models)})"
                )
            if self._pool is not None and spec.gpus > self._pool.gpus:
                raise PlatformError(f"{spec.name}: a replica needs {spec.gpus} GPUs, the pool has {self._pool.gpus}")
        for spec in specs:
            if spec.name in self.functions:
                self.functions[spec.name].spec = spec
            else:
                self.functions[spec.name] = _Function(spec, self._models[spec.name], self)
        self._deployed_s = now_s() if self._deployed_s is None else self._deployed_s

    async def scale(self, function: str, replicas: int) -> None:
        queue = deployed(self.functions, function)
        queue.want(replicas)
        queue.settle()

    async def call(self, function: str, call: Call) -> AsyncIterator[Event]:
        queue = deployed(self.functions, function)
        replica = await queue.acquire()
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        replica.events = events
        work = asyncio.create_task(_pump(perform(call, queue.model, replica.held, self._exchange), events))
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
            queue.release(replica)

    def replicas(self) -> list[Replica]:
        return [replica.replica() for function in self.functions.values() for replica in function.replicas]

    def usage(self) -> list[Usage]:
        """Replicas that still wait for GPUs are not paid for. In a colocated pool `gpu_s` is what is paid."""
        return usage(self._lives)

    async def close(self) -> None:
        self._closing_s = now_s()
        for function in self.functions.values():
            function.want(0)
            for replica in list(function.replicas):
                self.end(function, replica)
            function.hand_out()
        await asyncio.sleep(0)
        self._pay()
        self._closed_s = now_s() if self._closed_s is None else self._closed_s

    def take_turns(self, models: Mapping[str, Model], gpus: int) -> None:
        """From now on all functions take turns on so many GPUs, 0: none does; their work is that of `models`."""
        assert self._pool is not None, "asked in a pool only"
        self._pay()
        self._turns = gpus
        for name, function in self.functions.items():
            function.model = models.get(name, function.model)

    def gpu_s(self) -> float:
        """GPU-seconds paid for until now."""
        self._pay()
        return self._paid_s

    def _pay(self) -> None:
        until_s = now_s() if self._closed_s is None else self._closed_s
        if self._deployed_s is not None:
            self._paid_s += max(self._turns, self._taken) * (until_s - max(self._since_s, self._deployed_s))
        self._since_s = until_s

    def _take(self, gpus: int) -> None:
        """Less than 0: gives them back."""
        self._pay()
        self._taken += gpus

    def kill(self, name: str) -> None:
        """A replica dies (a node fails): its call is lost; another one is started while it is wanted."""
        for function in self.functions.values():
            for replica in function.replicas:
                if replica.name == name:
                    self.end(function, replica)
                    function.settle()
                    return
        raise KeyError(f"no replica {name!r}")

    # --- replicas, as their functions' queues ask for them -----------------------------------------------------------

    def start(self, function: _Function) -> _Replica:
        taken = {r.place for r in function.replicas}
        place = next(k for k in count() if k not in taken)
        name = f"{function.spec.name}-{next(self._numbers)}"
        replica = _Replica(function.spec.name, name, now_s(), place=place, held=Held(name))
        model = function.model
        replica.start_s = model.start_s
        if function.parked and model.back_s is not None:
            replica.start_s, replica.held.versions = model.back_s, function.parked.pop().versions
        self._lives.append(replica)
        self._queue.append(replica)
        self._admit()
        return replica

    def end(self, function: _Function, replica: _Replica) -> None:
        function.replicas.remove(replica)
        if replica.starting is not None:
            replica.starting.cancel()
        if replica.events is not None:
            replica.events.put_nowait(None)
        replica.stop()
        if function.model.back_s is not None and replica.starting is not None and replica.starting.done():
            function.parked.append(replica.held)
        if replica in self._queue:
            self._queue.remove(replica)
        elif replica.gpus and function.model.leave_s and self._closing_s is None:
            asyncio.get_running_loop().call_later(function.model.leave_s, self._left, replica)
        else:
            self._left(replica)

    def _left(self, replica: _Replica) -> None:
        self._take(-replica.gpus)
        replica.gpus = 0
        self._admit()

    def taken(self, function: _Function, replica: _Replica) -> bool:
        """In turns: whether a call is open on any GPU of the replica's place, or waits for it of a function that comes
        before this one: one that needs several GPUs would never find all of them free."""
        if not self._turns:
            return False
        mine, before = self._gpus(function, replica), True
        for other in self.functions.values():
            before &= other is not function
            for there in [*(r for r in other.replicas if not r.free), *(other.next() if before else ())]:
                if not mine.isdisjoint(self._gpus(other, there)):
                    return True
        return False

    def _gpus(self, function: _Function, replica: _Replica) -> set[int]:
        """Those of its place, which other functions' places overlap."""
        first = replica.place * function.spec.gpus
        return {k % self._turns for k in range(first, first + function.spec.gpus)}

    def _admit(self) -> None:
        """Gives free GPUs to the replicas that wait for them, in order: none overtakes one that needs more; what needs
        none waits for nobody."""
        full = False
        for replica in list(self._queue):
            function = self.functions[replica.function]
            gpus = 0 if self._turns else function.spec.gpus
            full |= self._pool is not None and self._taken + gpus > self._pool.gpus
            if full and gpus:
                continue
            self._queue.remove(replica)
            replica.gpus = gpus
            self._take(gpus)
            replica.started_s = now_s()
            replica.starting = asyncio.create_task(self._cold_start(function, replica))

    async def _cold_start(self, function: _Function, replica: _Replica) -> None:
        await asyncio.sleep(replica.start_s)
        replica.held.load_ahead(hinted(function.spec.name, self._exchange), function.model, now_s())
        function.up(replica)


async def _pump(source: AsyncGenerator[Event, None], events: asyncio.Queue[Event | None]) -> None:
    try:
        async for event in source:
            events.put_nowait(event)
    except Exception:
        events.put_nowait(None)
        raise
