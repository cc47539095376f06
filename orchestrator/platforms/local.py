"""The platform of one machine: a replica is a process, zero replicas are no process.

    scale --> start: forked from the warm parent (or fresh), listening at once --> idle --call--> busy --> idle
          --> stop:  idle ones are killed at once (crash-only: a replica holds nothing that the exchange does not),
                     busy ones are marked `draining` and go when their call has ended

A replica that ends without having been asked to is replaced while it is wanted. One that never gets as far as answering
is started three times; then the calls that wait for it raise PlatformError with the last line of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from functions.base.wire import Call, Event, WireError
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError, Replica, ReplicaState, Usage
from orchestrator.platforms.local_process import FreshLauncher, Launcher, Process, WarmLauncher, last_line

FAILED_STARTS = 3
EXIT_REPORT_S = 1.0
"""How long a lost call waits for the exit code of its replica, to be able to name it."""


@dataclass(eq=False)
class _Replica:
    function: str
    name: str
    started_s: float
    log: Path
    client: httpx.AsyncClient
    scratch: Path
    state: ReplicaState = "starting"
    since_s: float = 0.0
    ready_s: float | None = None
    draining_s: float | None = None
    stopped_s: float | None = None
    busy_s: float = 0.0
    busy_since_s: float | None = None
    process: Process | None = None

    def enter(self, state: ReplicaState, now_s: float) -> None:
        self.state, self.since_s = state, now_s
        if state == "draining":
            self.draining_s = now_s if self.draining_s is None else self.draining_s
        elif state != "starting":
            self.ready_s = now_s if self.ready_s is None else self.ready_s
            self.draining_s = None


@dataclass(eq=False)
class _Deployed:
    spec: FunctionSpec
    wanted: int = 0
    replicas: list[_Replica] = field(default_factory=list)
    """Those that exist, in the order of their start."""
    waiters: deque[asyncio.Future[_Replica]] = field(default_factory=deque)
    failed_starts: int = 0
    """In a row, since a replica last answered."""
    failure: str = ""

    @property
    def hopeless(self) -> bool:
        return bool(self.failure) and all(r.state == "draining" for r in self.replicas)


class LocalPlatform:
    """See Platform. `exchange` is the URL that replicas open; `log_dir` gets a file for each replica's output."""

    def __init__(self, exchange: str, job: str, *, log_dir: Path, warm_parent: bool = True) -> None:
        self._exchange, self._job = exchange, job
        self._log_dir = log_dir
        self._warm_parent = warm_parent
        self._functions: dict[str, _Deployed] = {}
        self._launcher: Launcher | None = None
        self._lives: list[_Replica] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._directory: Path | None = None
        self._closed = False

    async def deploy(self, specs: Sequence[FunctionSpec]) -> None:
        if self._closed:
            raise PlatformError("the local platform is closed")
        if self._launcher is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._directory = Path(tempfile.mkdtemp(prefix="rlhf-"))  # short: a Unix socket's path has 107 bytes
            if self._warm_parent:
                self._launcher = WarmLauncher(
                    sorted({spec.kind for spec in specs}),
                    (self._log_dir / "warm-parent.log").absolute(),
                    vllm=any(spec.options.get("engine") == "vllm" for spec in specs),
                )
                self._launcher.warm()
            else:
                self._launcher = FreshLauncher()
        for spec in specs:
            if spec.name in self._functions:
                self._functions[spec.name].spec = spec
            else:
                self._functions[spec.name] = _Deployed(spec)

    async def scale(self, function: str, replicas: int) -> None:
        deployed = self._deployed(function)
        if not 0 <= replicas <= deployed.spec.max_replicas:
            raise PlatformError(
                f"{replicas} replicas of {function!r} were asked for; it may have 0 to {deployed.spec.max_replicas}"
            )
        if replicas > deployed.wanted:
            deployed.failed_starts, deployed.failure = 0, ""
        deployed.wanted = replicas
        if replicas and self._launcher is not None:
            await self._launcher.ready()  # the warm parent's start is the platform's, no replica's
        self._settle(deployed)

    async def call(self, function: str, call: Call) -> AsyncIterator[Event]:
        deployed = self._deployed(function)
        replica = await self._acquire(deployed)
        last: Event | None = None
        whole = False
        try:
            async with replica.client.stream("POST", "/v1/call", json=call.to_json()) as response:
                if response.status_code != 200:
                    await self._refused(replica, call, response)
                async for line in response.aiter_lines():
                    event = Event.from_line(line)
                    deployed.failed_starts = 0
                    if event.kind in ("done", "error"):
                        last = event  # yielded when the replica is free again: whoever reads it may let it go
                    else:
                        yield event
            whole = last is not None and "deadline_s" not in last.data
        except (httpx.TransportError, WireError) as error:
            raise CallLost(await self._loss(replica, call, error)) from error
        finally:
            self._release(replica, whole)
        if last is None:
            raise CallLost(f"the answer to call {call.id} of {replica.name} ended without `done` or `error`")
        yield last

    def replicas(self) -> list[Replica]:
        return [Replica(r.function, r.name, r.state, r.since_s) for d in self._functions.values() for r in d.replicas]

    def usage(self) -> list[Usage]:
        now_s = self._now_s() if self._launcher is not None and not self._closed else 0.0
        return [
            Usage(
                r.function,
                r.name,
                r.started_s,
                r.stopped_s,
                r.busy_s + (0.0 if r.busy_since_s is None else now_s - r.busy_since_s),
                r.ready_s,
                r.draining_s,
            )
            for r in self._lives
        ]

    def processes(self) -> dict[str, list[int]]:
        """Pids of the replicas that exist, by function."""
        return {
            name: [r.process.pid for r in deployed.replicas if r.process is not None]
            for name, deployed in self._functions.items()
        }

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for deployed in self._functions.values():
            deployed.wanted = 0
            self._settle(deployed)
        if self._launcher is not None:
            await self._launcher.close()
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- calls -----------------------------------------------------------------------------------------------------

    async def _acquire(self, deployed: _Deployed) -> _Replica:
        name = deployed.spec.name
        if deployed.wanted == 0:
            raise CallLost(f"no replica of {name!r} is wanted")
        if deployed.hopeless:
            raise PlatformError(deployed.failure)
        waiter: asyncio.Future[_Replica] = asyncio.get_running_loop().create_future()
        deployed.waiters.append(waiter)
        self._hand_out(deployed)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release(waiter.result(), whole=True)
            raise

    def _hand_out(self, deployed: _Deployed) -> None:
        """Gives idle replicas, the longest-lived first, to those that wait for one, first come first served."""
        for replica in [r for r in deployed.replicas if r.state == "idle"]:
            while deployed.waiters and deployed.waiters[0].done():
                deployed.waiters.popleft()
            if not deployed.waiters:
                return
            now_s = self._now_s()
            replica.enter("busy", now_s)
            replica.busy_since_s = now_s
            deployed.waiters.popleft().set_result(replica)

    def _release(self, replica: _Replica, whole: bool) -> None:
        """A call is over. A replica whose answer was not whole may be at work on it still: it is replaced."""
        now_s = self._now_s()
        if replica.busy_since_s is not None:
            replica.busy_s += now_s - replica.busy_since_s
            replica.busy_since_s = None
        if replica.stopped_s is not None:
            return
        deployed = self._functions[replica.function]
        if not whole or replica.state == "draining":
            self._stop(replica)
        else:
            replica.enter("idle", now_s)
        self._settle(deployed)

    async def _refused(self, replica: _Replica, call: Call, response: httpx.Response) -> None:
        """Raises what a status other than 200 means."""
        body = await response.aread()
        try:
            detail = json.loads(body)["detail"]
        except (ValueError, KeyError, TypeError):
            detail = body.decode(errors="replace")[:200]
        message = f"{replica.name} answered {response.status_code} to call {call.id}: {detail}"
        if response.status_code == 503:
            raise CallLost(message)
        raise PlatformError(message)

    async def _loss(self, replica: _Replica, call: Call, error: Exception) -> str:
        lost = f"call {call.id} was lost: "
        if replica.process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(asyncio.shield(replica.process.exited), EXIT_REPORT_S)
                return lost + self._ending(replica, code)
        return f"{lost}the connection to {replica.name} broke: {error or type(error).__name__}"

    def _ending(self, replica: _Replica, code: int) -> str:
        if code < 0:
            return f"{replica.name} was killed by {signal.Signals(-code).name}"
        said = last_line(replica.log) or "no output"
        return f"{replica.name} ended with exit code {code}: {said} (see {replica.log})"

    # --- replicas --------------------------------------------------------------------------------------------------

    def _settle(self, deployed: _Deployed) -> None:
        """Starts or stops replicas until those that stay are those that are wanted, and hands out idle ones."""
        staying = [r for r in deployed.replicas if r.state != "draining"]
        for replica in sorted(staying, key=lambda r: ("idle", "starting", "busy").index(r.state)):
            if len(staying) <= deployed.wanted:
                break
            staying.remove(replica)
            if replica.state == "busy":
                replica.enter("draining", self._now_s())
            else:
                self._stop(replica)
        for replica in deployed.replicas:
            if len(staying) < deployed.wanted and replica.state == "draining" and replica.busy_since_s is not None:
                replica.enter("busy", self._now_s())
                staying.append(replica)
        while len(staying) < deployed.wanted and not deployed.failure:
            staying.append(self._start(deployed))
        self._hand_out(deployed)
        if deployed.wanted == 0 or deployed.hopeless:
            while deployed.waiters:
                waiter = deployed.waiters.popleft()
                if not waiter.done():
                    lost = CallLost(f"no replica of {deployed.spec.name!r} is wanted any more")
                    waiter.set_exception(PlatformError(deployed.failure) if deployed.hopeless else lost)

    def _start(self, deployed: _Deployed) -> _Replica:
        assert self._directory is not None
        spec, now_s = deployed.spec, self._now_s()
        name = f"{spec.name}-{sum(r.function == spec.name for r in self._lives)}"
        path = self._directory / f"{len(self._lives)}.sock"
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False, trust_env=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=None)
        scratch = self._directory / name
        log = (self._log_dir / f"{name}.log").absolute()
        replica = _Replica(spec.name, name, now_s, log, client, scratch, since_s=now_s)
        deployed.replicas.append(replica)
        self._lives.append(replica)
        self._spawn(self._live(deployed, replica, path))
        return replica

    async def _live(self, deployed: _Deployed, replica: _Replica, path: Path) -> None:
        """A replica's life, from its start until its process is gone."""
        assert self._launcher is not None
        spec = deployed.spec
        settings: dict[str, Any] = {
            "kind": spec.kind,
            "options": dict(spec.options),
            "exchange": self._exchange,
            "job": self._job,
            "function": spec.name,
            "name": replica.name,
            "threads": max(1, int(spec.cpus)),
            "scratch": str(replica.scratch),
        }
        failure = ""
        try:
            replica.scratch.mkdir()
            replica.process = await self._launcher.start(settings, path, replica.log)
            if replica.state == "draining" or self._closed:
                replica.process.kill()
            else:
                replica.enter("idle", self._now_s())
                self._hand_out(deployed)
            code = await replica.process.exited
            failure = self._ending(replica, code)
        except (PlatformError, OSError) as error:
            failure = str(error)
        asked_to = replica.state == "draining"
        replica.enter("draining", self._now_s())
        replica.stopped_s = self._now_s()
        deployed.replicas.remove(replica)
        path.unlink(missing_ok=True)
        shutil.rmtree(replica.scratch, ignore_errors=True)
        if not asked_to:
            deployed.failed_starts += 1
            if deployed.failed_starts >= FAILED_STARTS:
                deployed.failure = f"replicas of {spec.name!r} do not start: {failure}"
        self._settle(deployed)
        await replica.client.aclose()

    def _stop(self, replica: _Replica) -> None:
        replica.enter("draining", self._now_s())
        if replica.process is not None:
            replica.process.kill()

    # -----------------------------------------------------------------------------------------------------------------

    def _deployed(self, function: str) -> _Deployed:
        if function not in self._functions:
            known = ", ".join(self._functions) or "none"
            raise PlatformError(f"function {function!r} is not deployed (deployed: {known})")
        return self._functions[function]

    def _spawn(self, life: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
