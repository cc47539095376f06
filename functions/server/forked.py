"""A replica's process: forked from the agent that has the libraries loaded, under a keeper of its own (keeper.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from functions.server.keeper import HEARD, bound_memory, keep
from functions.server.settings import Settings


class Closes(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Start:
    """What a client of the agent wants: a replica of `settings` (JSON; its scratch is the agent's affair) that writes
    to `log` ("": the agent's own) and takes at most `memory_gb` (None: no bound), with `env` over the agent's."""

    settings: Mapping[str, Any]
    log: str
    memory_gb: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.settings["name"])


def fork(
    start: Start, listener: socket.socket, control: socket.socket, ours: Iterable[Closes], *, fresh: bool
) -> tuple[int, int]:
    """Pids of the keeper and of its replica (0: it ended at once), which serves on `listener` and hears `control`;
    `ours` are closed there. `fresh`: it is a new interpreter. Raises OSError."""
    own = os.getpid()
    with Pipe() as pids:
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # by the keeper, from its first moment
        try:
            keeper = os.fork()
            if keeper == 0:
                _keeper(start, listener, control, ours, own, pids, fresh)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        return keeper, pids.receive()


def _keeper(
    start: Start, listener: socket.socket, control: socket.socket, ours: Iterable[Closes], parent: int,
    pids: Pipe, fresh: bool,
) -> NoReturn:  # fmt: skip
    """The child of `parent`, which may be gone already. Never returns into the parent's code."""

    def told(pid: int) -> None:
        pids.send(pid)
        for end in (listener, control):
            end.close()

    try:
        for end in ours:
            end.close()
        keep(parent, lambda: _replica(start, listener, control, fresh), told)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _replica(start: Start, listener: socket.socket, control: socket.socket, fresh: bool) -> NoReturn:
    """The child of its keeper."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        write_to(start.log)
        os.environ.update(start.env)
        if start.memory_gb is not None:
            bound_memory(start.memory_gb)
        settings = Settings(**start.settings)
        if fresh:
            listener.set_inheritable(True)
            os.environ |= {"OMP_NUM_THREADS": str(settings.threads), "RLHF_TOKEN": ""}  # the socket is ours alone
            arguments = [*settings.command_line(), "--fd", str(listener.fileno())]
            os.execv(sys.executable, [sys.executable, "-m", "functions.server", *arguments])
        from functions.server.app import serve, set_threads

        set_threads(settings.threads)
        serve(settings, listener, control)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def write_to(log: str) -> None:
    """What this process prints from here on goes there; "": where it went."""
    if not log:
        return
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)


class Pipe:
    """Brings one pid from a child; 0 from one that ended without."""

    def __init__(self) -> None:
        self.ends = os.pipe()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                os.close(end)

    def send(self, pid: int) -> None:
        os.write(self.ends[1], pid.to_bytes(4))
        for end in self.ends:
            os.close(end)

    def receive(self) -> int:
        os.close(self.ends[1])
        return int.from_bytes(os.read(self.ends[0], 4))
