"""`python -m functions.server` where RLHF_AGENT is set: a pod whose function runs in a process of the node's agent.

    Knative --TCP--> ticket --Unix socket--> replica (a process of the agent: agent.py)
                       |  start, park                ^
                       +-----Unix socket----> agent -+

It holds the pod's resources (the GPU, in Kubernetes' books) and passes bytes on; it imports nothing that takes time.
It asks the agent at RLHF_AGENT for a process of its job, token, function and devices, parked or new, and gives it back
when the pod is to go. Where no agent answers, or it has no
process to give, this process becomes the function itself, as on a node without one.

    SIGTERM         no new connections; when those that are open have ended, the process parks, and this one ends
    process ends    this one ends with its code: Kubernetes starts another
    agent ends      so has the process: this one ends with 1
    killed          the agent sees its socket close, and kills the process, unless that is parking: a call in it is
                    made again elsewhere
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

AGENT = "RLHF_AGENT"
OWN = ("PATH", "HOME", "TMPDIR", "HOSTNAME", "PWD", "PORT")
OWN_PREFIXES = ("RLHF_", "PYTHON", "LD_", "KUBERNETES_", "K_")
"""Of the pod and its container, not of the job: other variables (credentials, devices) are the process's too."""
ANSWER_S = 30.0
"""Within it the agent answers a start."""
PARK_S = 130.0
PIECE = 1 << 16


def environment(own: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in own.items() if name not in OWN and not name.startswith(OWN_PREFIXES)}


class Ticket:
    def __init__(self, settings: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.settings, self.reader, self.writer = settings, reader, writer
        self.path = ""
        self.open: set[asyncio.Task[None]] = set()
        self.over = asyncio.Event()

    async def start(self) -> None:
        """Raises OSError, in a line, where the agent has no process to give."""
        self.tell(start={"settings": self.settings, "log": "", "env": environment(os.environ)})
        said = await asyncio.wait_for(self.hear(), ANSWER_S)
        if "started" not in said:
            raise OSError(said.get("failed", {}).get("message", f"it said {said}"))
        self.path = said["started"]["socket"]
        how = "was parked" if said["started"]["parked"] else "is new"
        print(f"process {said['started']['pid']} of the node's agent {how}", flush=True)

    def tell(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        line = await self.reader.readline()
        if not line:
            raise ConnectionError("the agent is gone")
        value: dict[str, Any] = json.loads(line)
        return value

    async def serve(self, port: int) -> int:
        """Until the pod is to go, or its process is gone; the exit code."""
        server = await asyncio.start_server(self.accept, "", port, backlog=128)
        gone = asyncio.create_task(self.hear())
        over = asyncio.create_task(self.over.wait())
        await asyncio.wait([gone, over], return_when=asyncio.FIRST_COMPLETED)
        server.close()
        if not gone.done():
            while self.open:
                await asyncio.wait([gone, *self.open], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    break
            else:
                self.tell(park=self.settings["name"])
                await asyncio.wait([gone], timeout=PARK_S)
        over.cancel()
        with contextlib.suppress(ConnectionError, asyncio.InvalidStateError):
            code = int(gone.result()["gone"]["code"])
            return code if code >= 0 else 128 - code
        return 1

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes of one connection, both ways, until both sides have closed."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            back, forth = await asyncio.open_unix_connection(self.path)
            await asyncio.gather(passed_on(reader, forth), passed_on(back, writer))
        except OSError:
            writer.transport.abort()
        finally:
            self.open.discard(task)


async def passed_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """What ends at one side ends at the other: a caller that closes its request cancels the call."""
    try:
        while piece := await source.read(PIECE):
            target.write(piece)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
    except OSError:
        target.transport.abort()
    finally:
        target.close()


async def run(settings: Mapping[str, Any], port: int, agent: str) -> int:
    """The exit code. Raises OSError where the function has to run here."""
    reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(agent), ANSWER_S)
    ticket = Ticket(settings, reader, writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ticket.over.set)
    try:
        await ticket.start()
        return await ticket.serve(port)
    finally:
        writer.close()


def main() -> None:
    from dataclasses import asdict

    from functions.server.settings import Settings

    settings, where = Settings.from_command_line(sys.argv[1:])
    told = {**asdict(settings), "scratch": "", "leased": True}
    try:
        code = asyncio.run(run(told, where.port, os.environ[AGENT]))
    except OSError as error:
        print(f"no process of the node's agent ({' '.join(str(error).split())}): the function runs here", flush=True)
        own = {name: value for name, value in os.environ.items() if name != AGENT}
        os.execve(sys.executable, [sys.executable, "-m", "functions.server", *sys.argv[1:]], own)
    sys.exit(code)
