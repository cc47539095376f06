"""How the local platform starts a replica, and hears of its end: through the parent that forks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functions.base.logs import LogLine
from orchestrator.platforms.base import PlatformError

Settings = Mapping[str, Any]
"""Keyword arguments of functions.server.settings.Settings; JSON values."""


@dataclass(frozen=True, eq=False)
class Process:
    """A replica's process. Its socket takes connections from the start, before anything is loaded."""

    pid: int
    exited: asyncio.Future[int]
    """The exit code; -9 when it was killed by signal 9."""
    kill: Callable[[], None]
    """Kills it and what it has started, at once."""


class Launcher:
    """Forks replicas from a parent (functions/server/warm.py), started with the first of them or by `warm`. It has what
    `kinds` of functions need loaded; None: nothing, each replica is a new interpreter.
    """

    def __init__(
        self, kinds: Sequence[str] | None, log: Path, *, vllm: bool = False, scratch: Path | None = None
    ) -> None:
        options = [*(["--scratch", str(scratch)] if scratch else []), *(["--vllm"] if vllm else [])]
        self._arguments = [*options, *(["--fresh"] if kinds is None else kinds)]
        self._log = log
        self._parent: asyncio.Task[_Parent] | None = None
        self._closed = False

    def warm(self) -> None:
        """Starts the parent if there is none, without waiting for it."""
        self._live_parent()

    async def ready(self) -> None:
        """Until replicas can be forked, or it is clear that they cannot (`start` then says why)."""
        await asyncio.wait([self._live_parent()])

    def _live_parent(self) -> asyncio.Task[_Parent]:
        task = self._parent
        if task is None or (task.done() and (task.exception() is not None or task.result().ended.done())):
            self._parent = task = asyncio.create_task(_Parent.start(self._arguments, self._log))
        return task

    async def start(self, settings: Settings, path: Path, log: Path, memory_gb: float | None = None) -> Process:
        """A replica that listens at the Unix socket `path`, writes its output to `log`, and may take `memory_gb`; None:
        what there is. Raises PlatformError.
        """
        if self._closed:
            raise PlatformError(f"cannot start {settings['name']}: the platform is closed")
        task = self._live_parent()
        try:
            parent = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise PlatformError(f"cannot start {settings['name']}: the platform was closed") from None
            raise
        return await parent.fork(settings, path, log, memory_gb)

    async def close(self) -> None:
        """Kills all replicas; returns when they are gone."""
        self._closed = True
        task = self._parent
        if task is None:
            return
        if not task.done():
            task.cancel()
        with contextlib.suppress(PlatformError, asyncio.CancelledError):
            await (await task).close()


class _Parent:
    """A warm parent that is ready."""

    def __init__(
        self, child: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._child, self._reader, self._writer = child, reader, writer
        self._forked: dict[str, asyncio.Future[int]] = {}
        self._exited: dict[str, asyncio.Future[int]] = {}
        self.ended = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, arguments: Sequence[str], log: Path) -> _Parent:
        ours, theirs = socket.socketpair()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        with theirs, log.open("ab") as output:
            starting = asyncio.ensure_future(asyncio.create_subprocess_exec(
                sys.executable, "-m", "functions.server.warm", "--parent", str(os.getpid()), *arguments,
                stdin=theirs.fileno(), stdout=output, stderr=output,
            ))  # fmt: skip
            try:
                child = await asyncio.shield(starting)
                theirs.close()  # from here on, the end of the child is the end of what `reader` reads
                ready = await reader.readline()
            except asyncio.CancelledError:
                child = await starting
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
                await child.wait()
                await _close(writer)
                raise
        if not ready:
            await _close(writer)
            code = await child.wait()
            raise PlatformError(f"the warm parent ended with exit code {code}: {last_line(log)} (see {log})")
        return cls(child, reader, writer)

    async def fork(self, settings: Settings, path: Path, log: Path, memory_gb: float | None) -> Process:
        name = settings["name"]
        loop = asyncio.get_running_loop()
        forked: asyncio.Future[int] = loop.create_future()
        exited: asyncio.Future[int] = loop.create_future()
        if self.ended.done():
            raise PlatformError(f"cannot start {name}: the warm parent is gone")
        self._forked[name], self._exited[name] = forked, exited
        start = {"socket": str(path), "log": str(log), "settings": dict(settings), "memory_gb": memory_gb}
        self._tell({"start": start})
        return Process(await forked, exited, lambda: self._tell({"kill": name}))

    def _tell(self, message: Mapping[str, Any]) -> None:
        if not self.ended.done():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        """Until the parent ends; its replicas end with it."""
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                [(what, said)] = json.loads(line).items()
                name = said["name"]
                if what == "started":
                    _set(self._forked.pop(name), said["pid"])
                elif what == "exited":
                    _set(self._exited.pop(name), said["code"])
                else:
                    self._exited.pop(name)
                    self._forked.pop(name).set_exception(PlatformError(f"{name}: {said['message']}"))
        await _close(self._writer)
        await self._child.wait()
        for future in self._forked.values():
            if not future.done():
                future.set_exception(PlatformError("the warm parent ended"))
        for future in self._exited.values():
            _set(future, -signal.SIGKILL)

    async def close(self) -> None:
        self._writer.close()
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
