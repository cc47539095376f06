"""The platform of one machine: a replica is a process, zero replicas are no process.

    scale --> start: from the node agent, parked before, forked or fresh; listening at once --> idle --call--> busy
          --> stop:  idle ones park (functions/server/agent.py), or are killed: crash-only, a replica holds nothing that
                     the exchange does not; busy ones are marked `draining` and go when their call has ended

A replica that ends without having been asked to is replaced while it is wanted. One that never gets as far as answering
is started three times; then the calls that wait for it raise PlatformError with the last line of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from functions.base.wire import Call, Event
from orchestrator.base.clock import now_s
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError, Replica, Usage
from orchestrator.platforms.local_process import Launcher, Process, last_line
from orchestrator.platforms.queue import Life, ReplicaQueue, deployed, usage
from orchestrator.platforms.scratch import Scratch
from orchestrator.platforms.stream import stream

FAILED_STARTS = 3
TIER_GB = 16.0
"""On this machine's disk, of versions that lie in a store elsewhere."""
EXIT_REPORT_S = 1.0
"""How long a lost call waits for the exit code of its replica, to be able to name it."""


@dataclass(eq=False)
class _Replica(Life):
    log: Path = Path()
    whole: bool = True
    """Nothing is at work in it when it is idle."""
    process: Process | None = None


class _Function(ReplicaQueue[_Replica]):
    failed_starts = 0
    """In a row, since a replica last answered."""

    def __init__(self, spec: FunctionSpec, platform: LocalPlatform) -> None:
        super().__init__(spec)
        self.platform = platform

    def want(self, replicas: int) -> None:
        if replicas > self.wanted:
            self.failed_starts = 0
        super().want(replicas)

    def start(self) -> _Replica:
        return self.platform.start(self)

    def stop(self, replica: _Replica) -> None:
        if replica.process is None:
            return
        if replica.whole and replica.ready_s is not None and not self.platform.closed:
            replica.process.park()
        else:
            replica.process.kill()

    def release(self, replica: _Replica, *, whole: bool = True) -> None:
        replica.whole &= whole
        super().release(replica, whole=whole)


class LocalPlatform:
    """See Platform. `exchange` is the URL that replicas open; `log_dir` gets a file for each replica's output;
    `parked_gb` is the memory that parked processes may take: half of the machine's by default."""

    def __init__(
        self, exchange: str, job: str, *, log_dir: Path, warm_parent: bool = True, parked_gb: float | None = None
    ) -> None:
        self._exchange, self._job = exchange, job
        self._log_dir = log_dir
        self._warm_parent = warm_parent
        self._parked_gb = _machine_gb() / 2 if parked_gb is None else parked_gb
        self._functions: dict[str, _Function] = {}
        self._launcher: Launcher | None = None
        self._lives: list[_Replica] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._scratch: Scratch | None = None
        self.closed = False

    async def deploy(self, specs: Sequence[FunctionSpec]) -> None:
        if self.closed:
            raise PlatformError("the local platform is closed")
        if self._launcher is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._scratch = Scratch()
            self._launcher = Launcher(
                sorted({spec.kind for spec in specs}) if self._warm_parent else None,
                (self._log_dir / "node-agent.log").absolute(),
                self._scratch.path,
                vllm=self._warm_parent and any(spec.options.get("engine") == "vllm" for spec in specs),
                parked_gb=self._parked_gb,
                tier_gb=TIER_GB if "s3://" in self._exchange else 0.0,
            )
            self._launcher.warm()
        for spec in specs:
            if spec.name in self._functions:
                self._functions[spec.name].spec = spec
            else:
                self._functions[spec.name] = _Function(spec, self)

    async def scale(self, function: str, replicas: int) -> None:
        queue = deployed(self._functions, function)
        queue.want(replicas)
        if replicas and self._launcher is not None:
            await self._launcher.ready()  # the agent's start is the platform's, no replica's
        queue.settle()

    async def call(self, function: str, call: Call) -> AsyncIterator[Event]:
        queue = deployed(self._functions, function)
        replica = await queue.acquire()
        over = False
        assert replica.process is not None, "it was up"
        try:
            transport = httpx.AsyncHTTPTransport(uds=str(replica.process.socket), verify=False, trust_env=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=None) as client:
                request = client.build_request("POST", "/v1/call", json=call.to_json())
                what = f"call {call.id} to {replica.name}"
                async with aclosing(stream(client, request, what, lost=(503,))) as events:
                    async for event in events:
                        queue.failed_starts = 0
                        replica.parked_s = float(event.data.get("parked_s", replica.parked_s))
                        if event.kind in ("done", "error"):
                            over = True  # before it is yielded: whoever reads it may let the replica go
                            queue.release(replica, whole="deadline_s" not in event.data)
                        yield event
        except CallLost as error:
            raise CallLost(await self._why(replica, call) or str(error)) from error
        finally:
            if not over:
                queue.release(replica, whole=False)

    def waiting(self) -> str:
        """What all replicas wait for, in one line."""
        loading = self._launcher is not None and self._launcher.loading
        return "importing the libraries, once for all replicas" if loading and not self.closed else ""

    def replicas(self) -> list[Replica]:
        return [replica.replica() for function in self._functions.values() for replica in function.replicas]

    def usage(self) -> list[Usage]:
        return usage(self._lives)

    def processes(self) -> dict[str, list[int]]:
        """Pids of the replicas that exist, by function."""
        return {
            name: [r.process.pid for r in function.replicas if r.process is not None]
            for name, function in self._functions.items()
        }

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for function in self._functions.values():
            function.want(0)
            function.settle()
        if self._launcher is not None:
            await self._launcher.close()
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        if self._scratch is not None:
            self._scratch.remove()

    # --- replicas --------------------------------------------------------------------------------------------------

    def start(self, function: _Function) -> _Replica:
        """For the function's queue."""
        spec, begun_s = function.spec, now_s()
        name = f"{spec.name}-{sum(r.function == spec.name for r in self._lives)}"
        replica = _Replica(
            spec.name, name, begun_s, begun_s,
            log=(self._log_dir / f"{name}.log").absolute(),
        )  # fmt: skip
        self._lives.append(replica)
        self._spawn(self._live(function, replica))
        return replica

    async def _live(self, function: _Function, replica: _Replica) -> None:
        """A replica's life, from its start until its process is parked or gone, with all that it has started."""
        assert self._launcher is not None
        spec = function.spec
        settings: dict[str, Any] = {
            "kind": spec.kind,
            "options": dict(spec.options),
            "exchange": self._exchange,
            "job": self._job,
            "function": spec.name,
            "name": replica.name,
            "threads": max(1, int(spec.cpus)),
        }
        try:
            replica.process = await self._launcher.start(settings, replica.log, _memory_gb(spec))
            if replica.state == "draining" or self.closed:
                replica.process.kill()
            else:
                function.up(replica)
            failure = self._ending(replica, await replica.process.gone)
        except (PlatformError, OSError) as error:
            failure = str(error)
        if replica.state != "draining":  # nobody has asked it to go
            function.failed_starts += 1
            if function.failed_starts >= FAILED_STARTS:
                function.failure = f"replicas of {spec.name!r} do not start: {failure}"
        function.gone(replica)

    async def _why(self, replica: _Replica, call: Call) -> str:
        """What became of the replica of a lost call, if it has ended."""
        if replica.process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_REPORT_S):
                    code = await asyncio.shield(replica.process.gone)
                return f"call {call.id} was lost: {self._ending(replica, code)}"
        return ""

    def _ending(self, replica: _Replica, code: int) -> str:
        if code == -signal.SIGKILL:
            return f"{replica.name} was killed by SIGKILL"
        said = last_line(replica.log) or "no output"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{replica.name} {how}: {said} (see {replica.log})"

    def _spawn(self, life: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _memory_gb(spec: FunctionSpec) -> float | None:
    """What a replica may take; not said: the machine's. No bound with GPUs: what CUDA maps would count too."""
    return None if spec.gpus else spec.memory_gb or _machine_gb()


def _machine_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
