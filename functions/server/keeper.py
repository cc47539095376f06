"""A replica's keeper: the process above it, which sees to it that nothing of the replica is left when it ends.

    node agent --fork--> keeper --fork--> replica --> whatever it starts, in whatever session
         | SIGTERM, or its death      | adopts what the replica leaves behind (Linux: prctl(2), PR_SET_CHILD_SUBREAPER)

It ends as its replica has ended, by the same code or signal, and not before all that the replica has started is gone. A
keeper that is killed itself takes its replica along; what that leaves falls to the agent, which does likewise.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Collection
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


def kill_orphans(known: Collection[int] = ()) -> None:
    """Kills all children but the `known`, and those that become ours by it; returns when they are gone."""
    while orphans := [pid for pid in children() if pid not in known]:
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            os.waitpid(pid, 0)


def keep(parent: int, replica: Callable[[], None], tell: Callable[[int], None]) -> NoReturn:
    """Forks a child that runs `replica`, tells its pid, and keeps it. Never returns.

    To be called in a child of `parent` that has one thread and was forked while `HEARD` was blocked.
    """
    die_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        die_with_parent(keeper)
        replica()
        os._exit(0)
    tell(pid)
    while (status := _reap(pid)) is None:
        if signal.sigwait(HEARD) == signal.SIGTERM:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    kill_orphans()
    _end_like(status)


def _reap(replica: int) -> int | None:
    """Of all children that have ended; the replica's status if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return None
        if pid == replica:
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
