"""How the local platform starts a replica, parks it, and hears of its end: through the node agent that forks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from functions.base.logs import LogLine
from functions.base.wire import Json
from functions.server.forkserver_client import FORKSERVER, ONE_HEAP, ask
from orchestrator.platforms.base import PlatformError

Settings = Mapping[str, Any]
"""Keyword arguments of functions.server.settings.Settings; JSON values."""


Begin = Callable[[socket.socket], Coroutine[Any, Any, asyncio.subprocess.Process | None]]
"""Starts an agent with this socket at its standard input; gives the process where it is a child."""


@dataclass(frozen=True, eq=False)
class Process:
    """A replica's process. Its socket takes connections from the start, before anything is loaded."""

    pid: int
    socket: Path
    gone: asyncio.Future[int]
    """The exit code; -9 when it was killed by signal 9, 0 also when it has parked."""
    park: Callable[[], None]
    """It is not wanted any more, and may be started again: it leaves its accelerator, or ends where it cannot park."""
    kill: Callable[[], None]
    """Kills it and what it has started, at once."""


class Launcher:
    """Starts replicas through an agent (functions/server/agent.py), itself started with the first of them or by `warm`.
    It has what `kinds` of functions need loaded (None: nothing, each replica is a new interpreter), and `parked_gb` of
    memory for processes that are parked. `scratch`: a directory for it and for them, with `tier_gb` of copies of what
    lies in their exchange.
    """

    def __init__(
        self, kinds: Sequence[str] | None, log: Path, scratch: Path, *, vllm: bool = False, parked_gb: float = 0.0,
        tier_gb: float = 0.0,
    ) -> None:  # fmt: skip
        options = ["--scratch", str(scratch), "--parked-gb", f"{parked_gb:g}", "--tier-gb", f"{tier_gb:g}"]
        options += ["--vllm"] if vllm else []
        self._arguments = [*options, *(["--fresh"] if kinds is None else kinds)]
        self._log = log
        self._agent: asyncio.Task[_Agent] | None = None
        self._closed = False

    def warm(self) -> None:
        """Starts the agent if there is none, without waiting for it."""
        self._live_agent()

    @property
    def loading(self) -> bool:
        """The agent imports what replicas are forked with."""
        return self._agent is not None and not self._agent.done()

    async def ready(self) -> None:
        """Until replicas can be forked, or it is clear that they cannot (`start` then says why)."""
        await asyncio.wait([self._live_agent()])

    def _live_agent(self) -> asyncio.Task[_Agent]:
        task = self._agent
        if task is None or (task.done() and (task.exception() is not None or task.result().ended.done())):
            self._agent = task = asyncio.create_task(_Agent.open(self._arguments, self._log))
        return task

    async def start(self, settings: Settings, log: Path, memory_gb: float | None = None) -> Process:
        """A replica that writes its output to `log` and may take `memory_gb` (None: what there is): a process of these
        settings that was parked, or a new one. Raises PlatformError.
        """
        if self._closed:
            raise PlatformError(f"cannot start {settings['name']}: the platform is closed")
        task = self._live_agent()
        try:
            agent = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise PlatformError(f"cannot start {settings['name']}: the platform was closed") from None
            raise
        return await agent.start(settings, log, memory_gb)

    async def close(self) -> None:
        """Kills all replicas; returns when they are gone."""
        self._closed = True
        task = self._agent
        if task is None:
            return
        if not task.done():
            task.cancel()
        with contextlib.suppress(PlatformError, asyncio.CancelledError):
            await (await task).close()


class _Agent:
    """A node agent that is ready. `child`: none of ours where a forkserver has forked it."""

    def __init__(
        self, child: asyncio.subprocess.Process | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._child, self._reader, self._writer = child, reader, writer
        self._started: dict[str, asyncio.Future[Json]] = {}
        self._gone: dict[str, asyncio.Future[int]] = {}
        self.ended = asyncio.create_task(self._read())
        self._closed = False

    @classmethod
    async def open(cls, arguments: Sequence[str], log: Path) -> _Agent:
        """Forked by the forkserver of this process's environment, where it can be; else a child of this process."""
        words, env = ["--parent", str(os.getpid()), *arguments], {**os.environ, **ONE_HEAP}
        with log.open("ab", buffering=0) as output:
            if (path := env.get(FORKSERVER)) and "--fresh" not in arguments:
                try:
                    return await cls._open(
                        lambda end: asyncio.to_thread(ask, path, words, env, end, output.fileno()), log
                    )
                except OSError as error:
                    output.write(f"no agent of the forkserver {path}: {error}\n".encode())
            return await cls._open(lambda end: asyncio.create_subprocess_exec(
                sys.executable, "-m", "functions.server.agent", *words,
                stdin=end.fileno(), stdout=output, stderr=output, env=env,
            ), log)  # fmt: skip

    @classmethod
    async def _open(cls, begin: Begin, log: Path) -> _Agent:
        ours, theirs = socket.socketpair()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        with theirs:
            starting = asyncio.ensure_future(begin(theirs))
            try:
                child = await asyncio.shield(starting)
                theirs.close()  # from here on, the end of the agent is the end of what `reader` reads
                ready = await reader.readline()
            except BaseException:
                with contextlib.suppress(OSError):
                    if (child := await starting) is not None:
                        child.kill()
                        await child.wait()
                await _close(writer)
                raise
        if not ready:
            await _close(writer)
            code = "" if child is None else f" with exit code {await child.wait()}"
            raise PlatformError(f"the node agent ended{code}: {last_line(log)} (see {log})")
        return cls(child, reader, writer)

    async def start(self, settings: Settings, log: Path, memory_gb: float | None) -> Process:
        name = settings["name"]
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Json] = loop.create_future()
        gone: asyncio.Future[int] = loop.create_future()
        if self.ended.done():
            raise PlatformError(f"cannot start {name}: the node agent is gone")
        self._started[name], self._gone[name] = started, gone
        self._tell({"start": {"log": str(log), "settings": dict(settings), "memory_gb": memory_gb}})
        said = await started
        park, kill = partial(self._tell, {"park": name}), partial(self._tell, {"kill": name})
        return Process(said["pid"], Path(said["socket"]), gone, park, kill)

    def _tell(self, message: Mapping[str, Any]) -> None:
        if not (self.ended.done() or self._closed):
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        """Until the agent ends; its replicas end with it."""
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                [(what, said)] = json.loads(line).items()
                name = said["name"]
                if what == "started":
                    self._started.pop(name).set_result(said)
                elif what == "gone":
                    _set(self._gone.pop(name), said["code"])
                else:
                    self._gone.pop(name)
                    self._started.pop(name).set_exception(PlatformError(f"{name}: {said['message']}"))
        await _close(self._writer)
        if self._child is not None:
            await self._child.wait()
        for future in self._started.values():
            if not future.done():
                future.set_exception(PlatformError("the node agent ended"))
        for gone in self._gone.values():
            _set(gone, -signal.SIGKILL)

    async def close(self) -> None:
        """Returns when it has ended, with all of its replicas."""
        self._closed = True
        with contextlib.suppress(OSError):  # it has ended already
            self._writer.write_eof()
        await self.ended


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _set(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)


def last_line(log: Path) -> str:
    """The message of the last line of a log that says something; empty when there is none."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((LogLine.parse(line).message.strip() for line in reversed(lines) if line.strip()), "")
