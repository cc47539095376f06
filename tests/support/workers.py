"""xdist's workers, forked from one process that has the libraries loaded, and with each worker its server of forked.py.

    pytest -- starts, as if it were the worker --> ASKS -- its input and output (SCM_RIGHTS) --> serve
      |                                                                                           | fork
      +--------------------------- execnet, over that input and output --------------------> worker -- fork --> server

What is left of the workers when pytest ends is killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any

ASKS = """
import os, socket
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect({path!r})
    socket.send_fds(asking, [b" "], [0, 1])
    os.closerange(0, 2)
    asking.recv(1)  # nothing: the worker has ended
    os._exit(0)
"""


@contextmanager
def forking(specs: Sequence[Any]) -> Iterator[None]:
    """Workers of these specifications are forked."""
    with tempfile.TemporaryDirectory(prefix="rlhf-workers-") as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path := f"{directory}/socket")
        listener.listen()
        words = [sys.executable, "-m", "tests.support.workers", str(listener.fileno())]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=env):
            for spec in specs:
                spec.python = shlex.join([sys.executable, "-SEc", ASKS.format(path=path)])
            yield


def serve(listener: socket.socket) -> None:
    """Until standard input ends; returns in workers, too, with execnet's as input and output."""
    workers = []
    while select.select([0, listener.fileno()], [], [])[0] == [listener.fileno()]:
        connection, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(connection, 1, 2)
        if (worker := os.fork()) == 0:
            listener.close()
            mark()
            start_server()
            for target, file in enumerate(files):
                os.dup2(file, target)
                os.close(file)
            main, sys.argv = ModuleType("__main__"), ["-c"]
            sys.modules["__main__"] = main
            exec(eval(sys.stdin.readline()), main.__dict__)
            connection.close()
            return
        workers.append(worker)
        connection.close()
        for file in files:
            os.close(file)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)  # a zombie, if it has ended


def mark() -> None:
    """The worker's own session (tiny_job.py), also in what /proc says of all that is forked from here: that is the
    memory in which this process got its environment (proc(5), env_start)."""
    before = f"RLHF_TEST_SESSION={os.environ['RLHF_TEST_SESSION']}".encode()
    from tests.support.tiny_job import MARK

    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    ctypes.memmove(start + ctypes.string_at(start, end - start).index(before), MARK.encode(), len(before))


def start_server() -> None:
    """That of multiprocessing, forked instead of a new interpreter."""
    resource_tracker.ensure_running()
    spawn, util.spawnv_passfds = util.spawnv_passfds, fork_server  # type: ignore[assignment]
    forkserver.ensure_running()
    util.spawnv_passfds = spawn


def fork_server(_interpreter: bytes, words: Sequence[Any], files: Sequence[int]) -> int:
    if (server := os.fork()) == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > 2 and file not in files:
                with suppress(OSError):
                    os.close(file)
        os.register_at_fork(after_in_child=partial(write_as, os.getppid(), os.getpid()))
        with suppress(SystemExit):  # when its worker has ended
            exec(words[-1])
        os._exit(0)
    return server


def write_as(worker: int, server: int) -> None:
    """What the server forks writes where its worker does: pytest captures it."""
    for target in (1, 2) if os.getppid() == server else ():
        with suppress(OSError), open(f"/proc/{worker}/fd/{target}", "a") as file:
            os.dup2(file.fileno(), target)


if __name__ == "__main__":
    from tests.support import warm  # noqa: F401

    assert "tests.support.tiny_job" not in sys.modules, "each worker is to have a mark of its own"
    serve(socket.socket(fileno=int(sys.argv[1])))
