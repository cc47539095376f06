"""The node agent: one process that has the libraries loaded, forks replicas, and keeps them parked between their uses.

    client  -- start, park, kill -->  agent  -- fork -->  keeper --> replica (server.serve)
            <-- started, gone ------    |    <-- park, unpark, parked, awake (a socket of its own) -->

    client: the orchestrator, on its machine: a socket at standard input; when it closes, the agent ends and takes all
            along. On a node of a cluster one of many tickets (ticket.py), at the Unix socket `--listen`; when one
            closes, the processes that it uses are killed

    in:   {"start": {"settings": {...}, "log", "memory_gb", "env": {...}}}    {"park": name}    {"kill": name}
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
With --fresh nothing is loaded beforehand, each replica is a new interpreter, and nothing parks. GET /metrics and
/healthz/live are answered at `--port`.
"""

import argparse
import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

from functions.base.prometheus import CONTENT_TYPE
from functions.base.wire import Json
from functions.exchange.node import DIRECTORY, LIMIT_GB
from functions.server import keeper
from functions.server.agent_metrics import EVICTIONS, HITS, MISSES, AgentMetrics
from functions.server.forked import Closes, Start, fork
from functions.server.kept import Replica, awaited, identity, started_by
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
TIER, FORGET_S = "tier", 30.0
"""Of its directory, the node's copies of what jobs have in their stores (functions/exchange/node.py); and how long a
job may have no process here before its copies go."""


class NodeAgent:
    def __init__(self, scratch: Path, *, parked_bytes: int, fresh: bool = False) -> None:
        self.scratch, self.fresh = scratch, fresh
        self.clients: set[Lines] = set()
        self.told = AgentMetrics(parked_bytes)
        self.parked_bytes = 0 if fresh else parked_bytes
        self.replicas: dict[int, Replica] = {}
        """By their keepers' pids; parked ones in the order in which they parked, after all others."""
        self.without: dict[str, float] = {}
        """Jobs that have no process here any more, and when their copies go."""
        self.made = 0
        self.helpers = keeper.children()
        """What libraries have started as they were loaded."""
        self.woken, self.wakeup = socket.socketpair()
        for end in (self.woken, self.wakeup):
            end.setblocking(False)
        self.selector = DefaultSelector()
        self.listeners: list[socket.socket] = []
        self.over = False

    def serve(self, client: socket.socket, *, alone: bool) -> None:
        """From now on; `alone`: the agent ends with it."""
        lines = Lines(client)
        self.clients.add(lines)
        self.selector.register(client, EVENT_READ, lambda: self.hear_client(lines, alone))

    def listen(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        self.selector.register(listener, EVENT_READ, lambda: accept(listener.accept()[0]))
        self.listeners.append(listener)

    def run(self) -> None:
        """Serves until a client that was alone closes its socket, or SIGTERM comes."""
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: None)  # heard through the wakeup descriptor
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.woken, EVENT_READ, self.hear_signals)
        while not self.over:
            for key, _ in self.selector.select(self.patience_s()):
                if self.selector.get_map().get(key.fd) is key:  # else it was closed by what was heard before it
                    heard: Callable[[], None] = key.data
                    heard()
            for replica in self.replicas.values():
                if replica.late_s < time.monotonic():
                    self.kill(replica)
            self.forget()

    def patience_s(self) -> float | None:
        late_s = min([*(replica.late_s for replica in self.replicas.values()), *self.without.values(), float("inf")])
        return None if late_s == float("inf") else max(0.0, late_s - time.monotonic()) + 0.1

    # --- what is heard ---------------------------------------------------------------------------------------------

    def hear_signals(self) -> None:
        numbers = self.woken.recv(4096)
        self.reap()
        self.over |= signal.SIGTERM in numbers

    def hear_client(self, client: Lines, alone: bool) -> None:
        try:
            for message in (lines := client.read()) or ():
                self.obey(client, message)
        except (ValueError, TypeError) as error:
            client.tell(failed={"name": "", "message": f"not understood: {' '.join(str(error).split())}"})
            lines = None
        if lines is None:
            self.selector.unregister(client.socket)
            client.socket.close()
            self.clients.discard(client)
            self.over |= alone
            for replica in self.replicas.values():
                if replica.client is client:
                    replica.client = None
                    if replica.state != "parking":  # else its pod's grace was the shorter
                        self.kill(replica)
                elif replica.following is not None and replica.following[0] is client:
                    replica.following = None
                    if replica.state == "waking":
                        self.kill(replica)

    def obey(self, client: Lines, message: Json) -> None:
        if "start" in message:
            self.start(client, Start(**message["start"]))
            return
        name = message.get("park", message.get("kill"))
        for replica in list(self.replicas.values()):
            if replica.client is client and replica.state == "working" and replica.start.name == name:
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

    def start(self, client: Lines, start: Start) -> None:
        parked = [r for r in self.replicas.values() if r.state == "parked" and identity(r.start) == identity(start)]
        if parked:
            self.wake(max(parked, key=lambda replica: (replica.version, replica.since_s)), client, start)
        elif parking := [r for r in self.replicas.values() if r.state == "parking" and awaited(r, start)]:
            parking[0].following = client, start
        else:
            self.told.add(MISSES, 1)
            self.fork(client, start)

    def fork(self, client: Lines, start: Start) -> None:
        begun_s, number = time.monotonic(), self.made
        self.made += 1
        scratch, path = self.scratch / str(number), self.scratch / f"{number}.sock"
        start = replace(start, settings={**start.settings, "scratch": str(scratch)})
        ours, theirs = socket.socketpair()
        try:
            scratch.mkdir()
            listener = listen_unix(str(path))
            with listener, theirs:
                others = [replica.control.socket for replica in self.replicas.values()]
                clients = [one.socket for one in self.clients]
                shut: list[Closes] = [self.woken, self.wakeup, self.selector, ours, *others, *clients, *self.listeners]
                pid, replica_pid = fork(start, listener, theirs, shut, fresh=self.fresh)
        except OSError as error:
            ours.close()
            self.remove(number)
            client.tell(failed={"name": start.name, "message": f"cannot start a process: {error}"})
            return
        self.replicas[pid] = replica = Replica(number, pid, replica_pid, Lines(ours), start, begun_s, client)
        self.selector.register(ours, EVENT_READ, lambda: self.hear_replica(replica))
        self.started(replica, parked=False)

    def started(self, replica: Replica, *, parked: bool) -> None:
        assert replica.client is not None, "who has asked for it"
        replica.enter("working")
        replica.client.tell(started={
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
        if replica.start.settings["kind"] not in OURS and started_by(replica):
            self.kill(replica)
            return
        replica.version = -1 if version is None else version
        replica.enter("parked")
        self.replicas[replica.keeper] = self.replicas.pop(replica.keeper)
        if replica.client is not None:
            replica.client.tell(gone={"name": replica.start.name, "code": 0, "parked": True})
        replica.client = None
        if replica.following is not None:
            following, replica.following = replica.following, None
            self.start(*following)
        self.evict()

    def evict(self) -> None:
        """Ends those that were used longest ago, until the rest fits."""
        parked = [replica for replica in self.replicas.values() if replica.state == "parked"]
        if sum(replica.at_most_bytes for replica in parked) <= self.parked_bytes:
            return
        excess = sum(replica.resident_bytes for replica in parked) - self.parked_bytes
        for replica in parked:
            if excess > 0:
                excess -= replica.resident_bytes
                self.told.add(EVICTIONS, 1)
                self.kill(replica)

    def wake(self, replica: Replica, client: Lines, start: Start) -> None:
        replica.enter("waking")
        replica.following, replica.begun_s = (client, start), time.monotonic()
        replica.control.tell(unpark={"name": start.name, "log": start.log})

    def awake(self, replica: Replica) -> None:
        assert replica.following is not None, "as it was told to wake"
        (replica.client, replica.start), replica.following = replica.following, None
        self.told.add(HITS, 1)
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
        if replica.client is not None:
            replica.client.tell(gone={"name": replica.start.name, "code": code, "parked": False})
        job = str(replica.start.settings["job"])
        if all(other.start.settings["job"] != job for other in self.replicas.values()) and replica.following is None:
            self.without[job] = time.monotonic() + FORGET_S
        if replica.following is not None:
            self.start(*replica.following)

    def forget(self) -> None:
        """What the node's tier has of jobs that have had no process here for a while."""
        working = {str(replica.start.settings["job"]) for replica in self.replicas.values()}
        for job, until_s in list(self.without.items()):
            if job in working or until_s < time.monotonic():
                del self.without[job]
                if job not in working:
                    shutil.rmtree(self.scratch / TIER / job, ignore_errors=True)

    def tidy(self) -> None:
        """What the processes of an agent before this one had: they have gone with it."""
        for path in self.scratch.iterdir():
            if path.name.removesuffix(".sock").isdecimal():
                self.remove(int(path.name.removesuffix(".sock")))

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

    def answer(self, connection: socket.socket) -> None:
        """One request for metrics, or for a sign of life."""
        connection.settimeout(1.0)
        with connection, contextlib.suppress(OSError):
            path = (connection.recv(4096).split() or [b""])[1:2]
            states = [replica.state for replica in self.replicas.values()]
            parked_bytes = sum(r.resident_bytes for r in self.replicas.values() if r.state == "parked")
            body = self.told.text(states, parked_bytes).encode() if path == [b"/metrics"] else b"ok\n"
            head = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"connection: close\r\n\r\n" + body)


def rss_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def preload(kinds: Sequence[str], scratch: str | None) -> None:
    """What replicas of these kinds need, in one thread."""
    os.environ.update(ONE_THREAD)
    from functions.server import warmup

    warmup.preload(kinds, scratch)


def main(arguments: Sequence[str] | None = None, *, loaded: Sequence[str] = ()) -> None:
    """`loaded`: kinds that were, in the process that this one was forked from (forkserver.py)."""
    parser = argparse.ArgumentParser(prog="python -m functions.server.agent", description=__doc__.partition("\n")[0])
    parser.add_argument("--parent", type=int, help="pid of the orchestrator, with a socket at standard input")
    parser.add_argument("--listen", help="path of a Unix socket for tickets")
    parser.add_argument("--port", type=int, help="TCP port of /metrics and /healthz/live")
    parser.add_argument("--vllm", action="store_true", help="load vLLM too")
    parser.add_argument("--fresh", action="store_true", help="load nothing: each replica is a new interpreter")
    parser.add_argument("--scratch", required=True, help="directory for sockets and what replicas put aside")
    parser.add_argument("--parked-gb", type=float, default=0.0, help="host memory for parked processes")
    parser.add_argument("--tier-gb", type=float, default=0.0, help="room for the node's copies of versions")
    parser.add_argument("kinds", nargs="*", help="kinds of functions to load")
    given = parser.parse_args(arguments)
    begun_s = time.perf_counter()
    with contextlib.suppress(PermissionError):  # a container's process leads its group already
        os.setsid()
    if given.parent is not None and not loaded:
        die_with_parent(given.parent)
    keeper.adopt_orphans()
    more = [kind for kind in given.kinds if kind not in loaded]
    if more or not (loaded or given.fresh):
        preload(more, given.scratch)
    if given.tier_gb:
        os.environ |= {DIRECTORY: f"{given.scratch}/{TIER}", LIMIT_GB: f"{given.tier_gb:g}"}
    if given.vllm:
        from functions.generate.vllm import start as vllm_start

        vllm_start.preload()
    agent = NodeAgent(Path(given.scratch), parked_bytes=int(given.parked_gb * 1e9), fresh=given.fresh)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"the node agent has {threads} threads after loading {' '.join(given.kinds)}: a fork is not safe")
    gc.collect()
    gc.freeze()
    seconds = time.perf_counter() - begun_s
    if given.port is not None:
        agent.listen(socket.create_server(("", given.port)), agent.answer)
    if given.listen is not None:
        agent.tidy()
        agent.listen(listen_unix(given.listen), lambda client: agent.serve(client, alone=False))
    if given.parent is not None:
        agent.serve(socket.socket(fileno=os.dup(0)), alone=True)
    for client in agent.clients:
        client.tell(ready={"threads": threads, "rss_mb": round(rss_mb(), 1), "seconds": round(seconds, 3)})
    try:
        agent.run()
    finally:
        agent.end()


if __name__ == "__main__":
    main()
