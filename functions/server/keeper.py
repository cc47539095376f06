"""The keeper: the process above the warm parent, which sees to it that nothing of it or of its replicas is left when it
ends.

    orchestrator --> keeper --fork--> warm parent --fork--> replica --> whatever it starts, in whatever session
         | SIGTERM, or its death         | adopts what a parent or a replica leaves behind (PR_SET_CHILD_SUBREAPER)

A replica adopts its own orphans while it lives; what it leaves falls to the warm parent, which kills it before it tells
of the replica's end; what the warm parent leaves falls to the keeper, which does likewise and ends as the parent has
ended, by the same code or signal. The keeper forks before anything is loaded, and is one for all replicas: one for each
would be one more fork of the loaded parent, whose copied page tables cost 10 to 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from functions.server.settings import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
HEARD = {signal.SIGCHLD, signal.SIGTERM}


def adopt_orphans() -> None:
    """Descendants of this process whose parents end become its children, not init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def bound_memory(memory_gb: float) -> None:
    """What this process may take beside what it has: heap, stacks and private mappings, not libraries or mapped files.

    An allocation beyond it fails: MemoryError in Python, RuntimeError in torch (setrlimit(2), RLIMIT_DATA).
    """
    status = Path("/proc/self/status").read_text()
    held_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    limit = held_kb * 1024 + int(memory_gb * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def kill_orphans(known: Collection[int] = ()) -> list[int]:
    """Kills all children but the `known`, without waiting for their end; which they are."""
    orphans = [pid for pid in children() if pid not in known]
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return orphans


def await_orphans(known: Collection[int] = ()) -> None:
    """Kills all children but the `known`, and those that become ours by it; returns when they are gone."""
    while orphans := kill_orphans(known):
        for pid in orphans:
            os.waitpid(pid, 0)


def keep(parent: int) -> None:
    """Forks a child, in which alone it returns, and keeps it; SIGTERM, or the end of `parent`, kills both.

    To be called by a process that has one thread and no children. Standard input is the child's alone.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # heard by sigwait
    die_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(keeper, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        return
    os.close(0)
    while (status := _reap(pid)) is None:
        if signal.sigwait(HEARD) == signal.SIGTERM:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await_orphans()
    _end_like(status)


def _reap(kept: int) -> int | None:
    """Of all children that have ended; the status of the `kept` one if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == kept:
            return status


def _end_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.Signals(-code)})
        os.kill(os.getpid(), -code)
    os._exit(code)
