"""Processes that are forked from a clean server with the libraries loaded, as replicas are from the node agent: a
fresh interpreter takes seconds of imports. One server for all tests of a worker, and for the forkserver of its jobs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from functions.server.agent import ONE_THREAD
from functions.server.forkserver_client import ONE_HEAP
from functions.server.settings import listen_unix

os.environ |= ONE_THREAD | ONE_HEAP  # of the server, and so of what it forks, from its first moment
Main = Callable[[Sequence[str]], int]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.warm"])


@contextlib.contextmanager
def forkserver(env: Mapping[str, str]) -> Iterator[str]:
    """As `keep` of functions/server/forkserver_client.py: its path. It is forked when an agent is first asked for."""
    directory = tempfile.mkdtemp(prefix="rlhf-forkserver-")
    path = f"{directory}/socket"
    alive, ours = CONTEXT.Pipe(duplex=False)
    over, end = os.pipe()

    def forked() -> None:
        if listener.fileno() in select.select([listener.fileno(), over], [], [])[0]:
            process = CONTEXT.Process(target=fork_agents, args=(listener, alive, dict(env)))
            process.start()
            alive.close()
            os.read(over, 1)
            process.join()

    with listen_unix(path) as listener:
        thread = threading.Thread(target=forked)
        thread.start()
        try:
            yield path
        finally:
            ours.close()
            os.close(end)
            thread.join()
            os.close(over)
            shutil.rmtree(directory)


def fork_agents(listener: socket.socket, alive: Connection, env: dict[str, str]) -> None:
    """Until the other end of `alive` is closed."""
    from functions.server.forkserver import Forkserver

    os.dup2(alive.fileno(), 0)
    os.environ.clear()
    os.environ.update(env | ONE_HEAP)
    sys.path.insert(0, "")  # an agent's own directory
    server = Forkserver(listener)
    server.loaded = True  # by warm.py
    server.serve()


class Forked:
    """A process, to be handled as a `subprocess.Popen`."""

    def __init__(self, target: Callable[..., None], *told: object, daemon: bool = True) -> None:
        self.process: ForkServerProcess = CONTEXT.Process(target=target, args=told, daemon=daemon)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still there after {timeout_s} s"
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedServer(Forked):
    """A function server, told what `python -m functions.server` is told."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], log: Path, stuck_s: float | None) -> None:
        super().__init__(_serve, list(arguments), dict(env), str(log), stuck_s)


def _serve(arguments: list[str], env: dict[str, str], log: str, stuck_s: float | None) -> None:
    from dataclasses import replace

    from functions.server.app import serve, set_threads
    from functions.server.settings import Settings

    _become(env, log, log)
    settings, where = Settings.from_command_line(arguments)
    set_threads(settings.threads)
    serve(settings if stuck_s is None else replace(settings, stuck_s=stuck_s), where.listen())


class ForkedAgent(Forked):
    """A node agent, told what `python -m functions.server.agent` is told; `client` is its standard input."""

    def __init__(self, arguments: Sequence[str], client: socket.socket | None = None) -> None:
        super().__init__(_agent, list(arguments), client, daemon=False)


def _agent(arguments: list[str], client: socket.socket | None) -> None:
    from functions.server.agent import main
    from functions.server.forkserver import KINDS

    if client is not None:
        os.dup2(client.fileno(), 0)
        client.close()
    main(arguments, loaded=KINDS)


class ForkedCommand(Forked):
    """A command line. What it prints is kept in files; `merged`: its errors among the output."""

    def __init__(self, main: Main, words: Sequence[str], env: Mapping[str, str], *, merged: bool = False) -> None:
        self._kept = Path(tempfile.mkdtemp(prefix="rlhf-command-"))
        self._files = [self._kept / name for name in ("out", "out" if merged else "err")]
        for file in self._files:
            file.touch()
        super().__init__(run_command, main, list(words), dict(env), *map(str, self._files), daemon=False)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Once, when it has ended; `merged`: everything twice."""
        try:
            self.wait(timeout)
        except AssertionError:
            self.kill()
            raise
        output, errors = (file.read_text() for file in self._files)
        shutil.rmtree(self._kept)
        return output, errors


def run_program(words: Sequence[str]) -> int:
    """As `python -c WORDS`, for a ForkedCommand."""
    sys.argv = ["-c", *words[1:]]
    exec(compile(words[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    return 0


def run_command(main: Main, words: list[str], env: dict[str, str], *paths: str) -> None:
    """A command line with these files as standard output and error."""
    _become(env, *paths)
    sys.path.insert(0, "")
    sys.exit(main(words))


def _become(env: Mapping[str, str], *paths: str) -> None:
    """What a new process would have: this environment, and these files as standard output and error."""
    for target, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    os.environ.clear()
    os.environ.update(env)
