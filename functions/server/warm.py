"""The warm parent: one process that has the libraries loaded, from which replicas are forked.

    orchestrator  -- {"start": {...}} -->  warm parent  -- listen, fork -->  replica (server.serve)
                  <-- started, exited --       |
                  (a socket at standard input; JSON lines; when it closes, all replicas are killed and the parent ends)

    in:   {"start": {"socket": path, "log": path, "memory_gb": bound or null, "settings": {...}}}    {"kill": name}
    out:  {"ready": {"threads", "rss_mb", "seconds"}}    {"started": {"name", "pid", "fork_s"}}
          {"failed": {"name", "message"}}    {"exited": {"name", "code"}}      code as subprocess: -9 for SIGKILL

Forking is safe because the parent has one thread: numeric libraries are held to one before they load, nothing that
starts a thread is used, and a parent that has more than one after loading says so and ends. `gc.freeze()` keeps the
collector of the replicas off the shared pages. A replica's socket listens before the fork, so its caller need not wait.
What a replica has started goes with it (functions/server/keeper.py). With --fresh nothing is loaded beforehand: each
replica is a new interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NoReturn

from functions.server.keeper import adopt_orphans, await_orphans, bound_memory, children, keep, kill_orphans
from functions.server.settings import Settings, die_with_parent, listen_unix

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for CUDA must not initialize it before a fork
}


class WarmParent:
    def __init__(self, control: socket.socket, *, fresh: bool = False) -> None:
        self.control, self.fresh = control, fresh
        self.replicas: dict[int, str] = {}
        """Names of the replicas that exist, by their pids."""
        self.ended: list[tuple[str, int]] = []
        """Names and exit codes of those whose end has not been told yet: something that they had started is there."""
        self.helpers = children()
        """What libraries have started as they were loaded."""
        self.woken, self.wakeup = socket.socketpair()
        for end in (self.woken, self.wakeup):
            end.setblocking(False)

    def run(self) -> None:
        """Serves until the control socket closes or SIGTERM comes."""
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: None)  # heard through the wakeup descriptor
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        rest = b""
        with DefaultSelector() as selector:
            selector.register(self.control, EVENT_READ)
            selector.register(self.woken, EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.woken:
                        numbers = self.woken.recv(4096)
                        self.reap()
                        if signal.SIGTERM in numbers:
                            return
                        continue
                    received = self.control.recv(1 << 16)
                    if not received:
                        return
                    *lines, rest = (rest + received).split(b"\n")
                    for line in lines:
                        self.obey(json.loads(line))

    def obey(self, message: Mapping[str, Any]) -> None:
        if "start" in message:
            self.start(**message["start"])
        else:
            for pid, name in self.replicas.items():
                if name == message["kill"]:
                    os.kill(pid, signal.SIGKILL)

    def start(self, settings: Mapping[str, Any], socket: str, log: str, memory_gb: float | None = None) -> None:
        begun_s = time.perf_counter()
        name, own = settings["name"], os.getpid()
        try:
            with listen_unix(socket) as listener:
                pid = os.fork()
                if pid == 0:
                    self.replica(Settings(**settings), listener, log, memory_gb, own)
        except OSError as error:
            self.tell({"failed": {"name": name, "message": f"cannot start a process: {error}"}})
            return
        self.replicas[pid] = name
        self.tell({"started": {"name": name, "pid": pid, "fork_s": round(time.perf_counter() - begun_s, 6)}})

    def replica(
        self, settings: Settings, listener: socket.socket, log: str, memory_gb: float | None, parent: int
    ) -> NoReturn:
        """The child of `parent`, which may be gone already. Never returns into the parent's code."""
        code = 1
        try:
            os.setsid()
            die_with_parent(parent)
            adopt_orphans()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for end in (self.control, self.woken, self.wakeup):
                end.close()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, nothing), (1, output), (2, output)):
                os.dup2(source, target)
            if memory_gb is not None:
                bound_memory(memory_gb)
            if self.fresh:
                listener.set_inheritable(True)
                os.environ |= {"OMP_NUM_THREADS": str(settings.threads), "RLHF_TOKEN": ""}  # the socket is ours alone
                arguments = [*settings.command_line(), "--fd", str(listener.fileno())]
                os.execv(sys.executable, [sys.executable, "-m", "functions.server", *arguments])
            from functions.server.app import serve, set_threads

            set_threads(settings.threads)
            serve(settings, listener)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def reap(self) -> None:
        """Tells of replicas that have ended once all that they had started is gone."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if (name := self.replicas.pop(ended[0], None)) is not None:
                    self.ended.append((name, os.waitstatus_to_exitcode(ended[1])))
        if not kill_orphans({*self.replicas, *self.helpers}):  # else SIGCHLD comes again
            for name, code in self.ended:
                self.tell({"exited": {"name": name, "code": code}})
            self.ended.clear()

    def tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the read that follows sees the end
            self.control.sendall(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        await_orphans(self.helpers)


def preload(kinds: Sequence[str], scratch: str | None = None) -> None:
    """Loads what replicas of these kinds need. A kind that cannot be loaded is left to its replicas, who say why."""
    from functions.call.function import FatalError
    from functions.server import kinds as functions_kinds
    from functions.server.warmup import warm_functions, warm_server

    warm_server(scratch)
    for kind in kinds:
        with contextlib.suppress(FatalError):
            functions_kinds.load(kind)
    if {"generate", "reference", "train"} & set(kinds):
        warm_functions(kinds, scratch)


def rss_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m functions.server.warm", description=__doc__.partition("\n")[0])
    parser.add_argument("--parent", type=int, required=True, help="pid of the orchestrator")
    parser.add_argument("--vllm", action="store_true", help="load vLLM too")
    parser.add_argument("--fresh", action="store_true", help="load nothing: each replica is a new interpreter")
    parser.add_argument("--scratch", help="directory for what loading puts aside")
    parser.add_argument("kinds", nargs="*", help="kinds of functions to load")
    given = parser.parse_args()
    begun_s = time.perf_counter()
    os.setsid()
    keep(given.parent)
    adopt_orphans()
    if not given.fresh:
        os.environ.update(ONE_THREAD)
        preload(given.kinds, given.scratch)
    if given.vllm:
        from functions.generate.vllm import start as vllm_start

        vllm_start.preload()
    parent = WarmParent(socket.socket(fileno=os.dup(0)), fresh=given.fresh)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"the warm parent has {threads} threads after loading {' '.join(given.kinds)}: a fork is not safe")
    gc.collect()
    gc.freeze()
    seconds = time.perf_counter() - begun_s
    parent.tell({"ready": {"threads": threads, "rss_mb": round(rss_mb(), 1), "seconds": round(seconds, 3)}})
    try:
        parent.run()
    finally:
        parent.end()


if __name__ == "__main__":
    main()
