"""The node agent: one process that has the libraries loaded, forks replicas, and keeps them parked between their uses.

    orchestrator  -- start, park, kill -->  agent  -- fork -->  keeper --> replica (server.serve)
                  <-- started, gone ------    |    <-- park, unpark, parked, awake (a socket of its own) -->
                  (a socket at standard input, JSON lines; when it closes, all is killed and the agent ends)

    in:   {"start": {"settings": {...}, "log": path, "memory_gb": bound or null}}    {"park": name}    {"kill": name}
    out:  {"ready": {"threads", "rss_mb", "seconds"}}    {"started": {"name", "pid", "socket", "parked", "seconds"}}
          {"gone": {"name", "code", "parked"}}    {"failed": {"name", "message"}}    code as subprocess: -9 for SIGKILL

    zero --start: fork--> working --park--> parked --start of the same function: unpark--> working
                             | kill, its end       | budget full: the one that was used longest ago; its end
                             v                     v
                            zero                  zero

A process that parks has left its accelerator and private memory (functions/call/function.py, Parks); what it takes then
counts against `--parked-gb`. A start gets the parked process of its function, with the same settings and the same
token, whose version is the newest; where that dies as it wakes, a new one. A function that cannot park, and one in
which users' code has left processes behind, is ended instead: nothing that a replica starts outlives it.

Forking is safe because the agent has one thread: numeric libraries are held to one before they load, nothing that
starts a thread is used, and an agent that has more than one after loading says so and ends. `gc.freeze()` keeps the
collector of the replicas off the shared pages. A replica's socket listens before the fork, so its caller need not wait.
With --fresh nothing is loaded beforehand, each replica is a new interpreter, and nothing parks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Literal

from functions.server import keeper
from functions.server.forked import Start, fork
from functions.server.lines import Lines
from functions.server.settings import die_with_parent, listen_unix

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for CUDA must not initialize it before a fork
}
OURS = ("generate", "reference", "train")
"""Kinds that run no users' code: processes that they start are part of them (vLLM's workers)."""
PARK_S, WAKE_S = 120.0, 10.0
"""Most that a process takes to leave its accelerator, and to say that it has heard that it is wanted."""

State = Literal["working", "parking", "parked", "waking", "ending"]


@dataclass(eq=False)
class Replica:
    """A process. `start` is that of its life, or the last one's while it is parked."""

    number: int
    keeper: int
    pid: int
    control: Lines
    start: Start
    begun_s: float
    state: State = "working"
    since_s: float = 0.0
    used: bool = True
    """The client has it, and has not been told that it is gone."""
    version: int = -1
    resident_bytes: int = 0
    following: Start | None = None
    """The start that waits for it: to be awake, or first to be parked."""

    def enter(self, state: State) -> None:
        self.state, self.since_s = state, time.monotonic()

    @property
    def late_s(self) -> float:
        """When it has taken too long for what it was told; never where it was told nothing."""
        return self.since_s + {"parking": PARK_S, "waking": WAKE_S}.get(self.state, float("inf"))


class NodeAgent:
    def __init__(self, client: socket.socket, scratch: Path, *, parked_bytes: int, fresh: bool = False) -> None:
        self.client, self.scratch, self.fresh = Lines(client), scratch, fresh
        self.parked_bytes = 0 if fresh else parked_bytes
        self.replicas: dict[int, Replica] = {}
        """By their keepers' pids; parked ones in the order in which they parked, after all others."""
        self.made = 0
        self.helpers = keeper.children()
        """What libraries have started as they were loaded."""
        self.woken, self.wakeup = socket.socketpair()
        for end in (self.woken, self.wakeup):
            end.setblocking(False)
        self.selector = DefaultSelector()
        self.over = False

    def run(self) -> None:
        """Serves until the client closes its socket or SIGTERM comes."""
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: None)  # heard through the wakeup descriptor
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.client.socket, EVENT_READ, self.hear_client)
        self.selector.register(self.woken, EVENT_READ, self.hear_signals)
        while not self.over:
            for key, _ in self.selector.select(self.patience_s()):
                heard: Callable[[], None] = key.data
                heard()
            for replica in self.replicas.values():
                if replica.late_s < time.monotonic():
                    self.kill(replica)

    def patience_s(self) -> float | None:
        late_s = min((replica.late_s for replica in self.replicas.values()), default=float("inf"))
        return None if late_s == float("inf") else max(0.0, late_s - time.monotonic()) + 0.1

    # --- what is heard ---------------------------------------------------------------------------------------------

    def hear_signals(self) -> None:
        numbers = self.woken.recv(4096)
        self.reap()
        self.over |= signal.SIGTERM in numbers

    def hear_client(self) -> None:
        lines = self.client.read()
        if lines is None:
            self.over = True
        for message in lines or ():
            if "start" in message:
                self.start(Start(**message["start"]))
                continue
            name = message.get("park", message.get("kill"))
            for replica in list(self.replicas.values()):
                if replica.state == "working" and replica.start.name == name:
                    self.park(replica) if "park" in message else self.kill(replica)

    def hear_replica(self, replica: Replica) -> None:
        lines = replica.control.read()
        if lines is None:  # it ends: its keeper will say how
            self.selector.unregister(replica.control.socket)
        for message in lines or ():
            if "parked" in message and replica.state == "parking":
                self.parked(replica, message["parked"]["version"])
            elif "awake" in message and replica.state == "waking":
                self.awake(replica)
            elif "refused" in message:
                self.kill(replica)

    # --- zero, working, parked -------------------------------------------------------------------------------------

    def start(self, start: Start) -> None:
        same = [r for r in self.replicas.values() if r.following is None and _identity(r.start) == _identity(start)]
        parked = [replica for replica in same if replica.state == "parked"]
        if parked:
            self.wake(max(parked, key=lambda replica: (replica.version, replica.since_s)), start)
        elif parking := [replica for replica in same if replica.state == "parking"]:
            parking[0].following = start
        else:
            self.fork(start)

    def fork(self, start: Start) -> None:
        begun_s, number = time.monotonic(), self.made
        self.made += 1
        scratch, path = self.scratch / str(number), self.scratch / f"{number}.sock"
        start = Start({**start.settings, "scratch": str(scratch)}, start.log, start.memory_gb)
        ours, theirs = socket.socketpair()
        try:
            scratch.mkdir()
            listener = listen_unix(str(path))
            with listener, theirs:
                others = [replica.control.socket for replica in self.replicas.values()]
                shut = [self.client.socket, self.woken, self.wakeup, self.selector, ours, *others]
                pid, replica_pid = fork(start, listener, theirs, shut, fresh=self.fresh)
        except OSError as error:
            ours.close()
            self.remove(number)
            self.client.tell(failed={"name": start.name, "message": f"cannot start a process: {error}"})
            return
        self.replicas[pid] = replica = Replica(number, pid, replica_pid, Lines(ours), start, begun_s)
        self.selector.register(ours, EVENT_READ, lambda: self.hear_replica(replica))
        self.started(replica, parked=False)

    def started(self, replica: Replica, *, parked: bool) -> None:
        replica.enter("working")
        replica.used = True
        self.client.tell(started={
            "name": replica.start.name, "pid": replica.pid, "socket": str(self.scratch / f"{replica.number}.sock"),
            "parked": parked, "seconds": round(time.monotonic() - replica.begun_s, 6),
        })  # fmt: skip

    def park(self, replica: Replica) -> None:
        if not self.parked_bytes:
            self.kill(replica)
            return
        replica.enter("parking")
        replica.control.tell(park={})

    def parked(self, replica: Replica, version: int | None) -> None:
        if replica.start.settings["kind"] not in OURS and _started_by(replica):
            self.kill(replica)
            return
        replica.version = -1 if version is None else version
        replica.resident_bytes = resident_bytes(replica.pid)
        replica.enter("parked")
        self.replicas[replica.keeper] = self.replicas.pop(replica.keeper)
        replica.used = False
        self.client.tell(gone={"name": replica.start.name, "code": 0, "parked": True})
        if replica.following is not None:
            following, replica.following = replica.following, None
            self.wake(replica, following)
        self.evict()

    def evict(self) -> None:
        """Ends those that were used longest ago, until the rest fits."""
        parked = [replica for replica in self.replicas.values() if replica.state == "parked"]
        excess = sum(replica.resident_bytes for replica in parked) - self.parked_bytes
        for replica in parked:
            if excess > 0:
                excess -= replica.resident_bytes
                self.kill(replica)

    def wake(self, replica: Replica, start: Start) -> None:
        replica.enter("waking")
        replica.following, replica.begun_s = start, time.monotonic()
        replica.control.tell(unpark={"name": start.name, "log": start.log})

    def awake(self, replica: Replica) -> None:
        assert replica.following is not None, "as it was told to wake"
        replica.start, replica.following = replica.following, None
        self.started(replica, parked=True)

    def kill(self, replica: Replica) -> None:
        replica.enter("ending")
        with contextlib.suppress(ProcessLookupError):
            os.kill(replica.keeper, signal.SIGTERM)

    def reap(self) -> None:
        while self.replicas:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if (replica := self.replicas.pop(pid, None)) is not None:
                self.ended(replica, os.waitstatus_to_exitcode(status))
        keeper.kill_orphans({*self.replicas, *self.helpers})  # of a keeper that was killed

    def ended(self, replica: Replica, code: int) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(replica.control.socket)
        replica.control.socket.close()
        self.remove(replica.number)
        if replica.used:
            self.client.tell(gone={"name": replica.start.name, "code": code, "parked": False})
        if replica.following is not None:
            self.start(replica.following)

    def remove(self, number: int) -> None:
        """What a process had in the agent's directory."""
        shutil.rmtree(self.scratch / str(number), ignore_errors=True)
        (self.scratch / f"{number}.sock").unlink(missing_ok=True)

    def end(self) -> None:
        for replica in self.replicas.values():
            self.kill(replica)
        for replica in self.replicas.values():
            os.waitpid(replica.keeper, 0)
            self.remove(replica.number)
        keeper.kill_orphans(self.helpers)


def _identity(start: Start) -> tuple[str, float | None]:
    """What must be equal for a parked process to serve a start: everything but its name, the job's token included."""
    settings = {key: value for key, value in start.settings.items() if key not in ("name", "scratch")}
    return json.dumps(settings, sort_keys=True), start.memory_gb


def _started_by(replica: Replica) -> list[int]:
    """Processes that it has started, and those that they left to its keeper."""
    found = [int(pid) for path in Path(f"/proc/{replica.pid}/task").glob("*/children") for pid in _read(path).split()]
    of_keeper = _read(Path(f"/proc/{replica.keeper}/task/{replica.keeper}/children")).split()
    return found + [int(pid) for pid in of_keeper if int(pid) != replica.pid]


def resident_bytes(pid: int) -> int:
    """Memory that would be free without this process: what it shares is counted in parts (proc(5), Pss)."""
    lines = _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _read(path: Path) -> str:
    """Nothing where the process has just ended."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def rss_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m functions.server.agent", description=__doc__.partition("\n")[0])
    parser.add_argument("--parent", type=int, required=True, help="pid of the orchestrator")
    parser.add_argument("--vllm", action="store_true", help="load vLLM too")
    parser.add_argument("--fresh", action="store_true", help="load nothing: each replica is a new interpreter")
    parser.add_argument("--scratch", required=True, help="directory for sockets and what replicas put aside")
    parser.add_argument("--parked-gb", type=float, default=0.0, help="host memory for parked processes")
    parser.add_argument("kinds", nargs="*", help="kinds of functions to load")
    given = parser.parse_args()
    begun_s = time.perf_counter()
    os.setsid()
    die_with_parent(given.parent)
    keeper.adopt_orphans()
    if not given.fresh:
        os.environ.update(ONE_THREAD)
        from functions.server.warmup import preload

        preload(given.kinds, given.scratch)
    if given.vllm:
        from functions.generate.vllm import start as vllm_start

        vllm_start.preload()
    client, parked_bytes = socket.socket(fileno=os.dup(0)), int(given.parked_gb * 1e9)
    agent = NodeAgent(client, Path(given.scratch), parked_bytes=parked_bytes, fresh=given.fresh)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"the node agent has {threads} threads after loading {' '.join(given.kinds)}: a fork is not safe")
    gc.collect()
    gc.freeze()
    seconds = time.perf_counter() - begun_s
    agent.client.tell(ready={"threads": threads, "rss_mb": round(rss_mb(), 1), "seconds": round(seconds, 3)})
    try:
        agent.run()
    finally:
        agent.end()


if __name__ == "__main__":
    main()
