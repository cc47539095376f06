"""What every platform does alike: calls wait for replicas, replicas come and go, their time is kept.

    call --> FunctionQueue.acquire --(a place is free)--> the attempt --> release --> the next that waits
    scale -> ReplicaQueue.settle: more are wanted: start; fewer: idle ones go, then starting ones, the youngest first;
             as many busy ones are `draining` as are too many, and the first of them all whose call ends goes

`FunctionQueue` knows only places: what a place is, its platform says (`free`). `ReplicaQueue` is for platforms that
start and stop replicas themselves. `Life` is one replica's time, from which `Replica` and `Usage` are read.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from orchestrator.base.clock import now_s
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError, Replica, ReplicaState, Usage

Place = TypeVar("Place")


@dataclass(eq=False)
class Life:
    """One replica's time. Times are the event loop's; paid for from `started_s` (None: not yet) to `stopped_s`."""

    function: str
    name: str
    since_s: float
    """When it entered its state."""
    started_s: float | None = None
    stopped_s: float | None = None
    state: ReplicaState = "starting"
    ready_s: float | None = None
    draining_s: float | None = None
    busy_s: float = 0.0
    busy_since_s: float | None = None
    parked_s: float = 0.0

    @property
    def free(self) -> bool:
        """No call of ours is open on it."""
        return self.busy_since_s is None

    def enter(self, state: ReplicaState) -> None:
        if state == self.state:
            return
        self.state, self.since_s = state, now_s()
        if state == "draining":
            self.draining_s = self.since_s
        elif state != "starting":
            self.draining_s = None
            self.ready_s = self.since_s if self.ready_s is None else self.ready_s

    def take(self) -> None:
        """A call has begun on it."""
        self.busy_since_s = now_s()

    def release(self) -> None:
        """Its call, if there is one, is over."""
        if self.busy_since_s is not None:
            self.busy_s += now_s() - self.busy_since_s
            self.busy_since_s = None

    def stop(self) -> None:
        """It is gone, with its call."""
        self.release()
        self.enter("draining")
        self.stopped_s = now_s() if self.stopped_s is None else self.stopped_s

    def replica(self) -> Replica:
        return Replica(self.function, self.name, self.state, self.since_s)


def usage(lives: Iterable[Life]) -> list[Usage]:
    """Of the lives that have been paid for, in order of their start."""
    paid = [(life.started_s, life) for life in lives if life.started_s is not None]
    return [
        Usage(
            life.function, life.name, started_s, life.stopped_s,
            life.busy_s + (0.0 if life.busy_since_s is None else now_s() - life.busy_since_s),
            life.ready_s, life.draining_s, life.parked_s,
        )
        for started_s, life in sorted(paid, key=lambda pair: pair[0])
    ]  # fmt: skip


class FunctionQueue(ABC, Generic[Place]):
    """A deployed function, and the calls that wait for a place: first come, first served."""

    def __init__(self, spec: FunctionSpec) -> None:
        self.spec = spec
        self.wanted = 0
        self.failure = ""
        """Why it has been given up, in a line; until more replicas are wanted again."""
        self._waiters: deque[asyncio.Future[Place]] = deque()

    @property
    def hopeless(self) -> bool:
        """Given up: calls fail with `failure`."""
        return bool(self.failure)

    @abstractmethod
    def free(self) -> Place | None:
        """A place that is free, which is taken from now on; None: there is none."""

    @abstractmethod
    def release(self, place: Place) -> None:
        """A call on `place` is over. Hands it out again."""

    def want(self, replicas: int) -> None:
        """Raises PlatformError for more than there may be."""
        most = self.spec.max_replicas
        if not 0 <= replicas <= most:
            raise PlatformError(f"{replicas} replicas of {self.spec.name!r} were asked for; it may have 0 to {most}")
        if replicas > self.wanted:
            self.failure = ""
        self.wanted = replicas

    async def acquire(self) -> Place:
        """Waits for a place as long as a replica is wanted. Raises CallLost, PlatformError."""
        if self.hopeless:
            raise PlatformError(self.failure)
        if self.wanted == 0:
            raise CallLost(f"no replica of {self.spec.name!r} is wanted")
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.hand_out()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())
            raise

    def hand_out(self) -> None:
        """Free places to those that wait; when none will come, that to all of them."""
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.done():
                self._waiters.popleft()
            elif self.hopeless:
                waiter.set_exception(PlatformError(self.failure))
            elif self.wanted == 0:
                waiter.set_exception(CallLost(f"no replica of {self.spec.name!r} is wanted any more"))
            elif (place := self.free()) is not None:
                waiter.set_result(place)
            else:
                return


AnyQueue = TypeVar("AnyQueue", bound=FunctionQueue[Any])


def deployed(functions: Mapping[str, AnyQueue], name: str) -> AnyQueue:
    """Raises PlatformError for a function that is not."""
    if name not in functions:
        raise PlatformError(f"function {name!r} is not deployed (deployed: {', '.join(functions) or 'none'})")
    return functions[name]


AnyLife = TypeVar("AnyLife", bound=Life)


class ReplicaQueue(FunctionQueue[AnyLife]):
    """A function whose replicas its platform starts and stops itself; a place is an idle replica."""

    def __init__(self, spec: FunctionSpec) -> None:
        super().__init__(spec)
        self.replicas: list[AnyLife] = []
        """Those that exist, in the order of their start."""

    @abstractmethod
    def start(self) -> AnyLife:
        """Begins to start one more, in state `starting`; the platform says when it is up (`up`)."""

    @abstractmethod
    def stop(self, replica: AnyLife) -> None:
        """Lets a replica without a call go, now; the platform says when it is gone (`gone`)."""

    def fits(self, replica: AnyLife) -> bool:
        """Whether an idle replica can take a call."""
        return True

    @property
    def staying(self) -> list[AnyLife]:
        """Those that have not been let go; a draining one with a call open may still be taken back."""
        return [r for r in self.replicas if r.state != "draining" or not r.free]

    @property
    def hopeless(self) -> bool:
        return bool(self.failure) and not self.staying

    def free(self) -> AnyLife | None:
        """The longest-lived of the idle ones."""
        for replica in self.replicas:
            if replica.state == "idle" and self.fits(replica):
                replica.enter("busy")
                replica.take()
                return replica
        return None

    def up(self, replica: AnyLife) -> None:
        """It can take calls."""
        replica.enter("idle")
        self.hand_out()

    def release(self, replica: AnyLife, *, whole: bool = True) -> None:
        """Its call is over. One whose answer was not `whole` may be at work on it still: it is replaced."""
        replica.release()
        if replica in self.replicas:
            replica.enter("idle")
            if not whole:
                self._let_go(replica)
        self.settle()

    def gone(self, replica: AnyLife) -> None:
        """It does not exist any more, for whatever reason; another one is started while it is wanted."""
        replica.stop()
        if replica in self.replicas:
            self.replicas.remove(replica)
        self.settle()

    def settle(self) -> None:
        """Starts and lets go until as many stay as are wanted; hands out idle ones."""
        staying = self.staying
        excess = len(staying) - self.wanted
        for state in ("idle", "starting"):
            for replica in [r for r in reversed(staying) if r.state == state][: max(0, excess)]:
                self._let_go(replica)
                excess -= 1
        for number, replica in enumerate(r for r in staying if not r.free):
            replica.enter("draining" if number < excess else "busy")
        if not self.failure:
            for _ in range(-excess):
                self.replicas.append(self.start())
        self.hand_out()

    def _let_go(self, replica: AnyLife) -> None:
        replica.enter("draining")
        self.stop(replica)
