"""Forks node agents from one process that has the libraries loaded: the second job of a machine begins in a second.

    orchestrator -- its identity, environment, directory; the agent's socket and log (SCM_RIGHTS) -->  forkserver
                 <-- "forked", or why not --                                                           | fork
                 <-------------------- the socket: the agent's protocol --------------------> agent, the job's own

What is loaded is code and nothing of any job. An agent from here is one job's as one that its orchestrator has started:
with that one's environment and directory, gone with its socket. Who runs other code, lives under other limits or in
another namespace, or differs in what libraries read of the environment as they load (READ), is refused and starts an
agent itself. The libraries are loaded when the first agent is asked for. The forkserver ends when its standard input
does; agents that it has forked go on.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from functions.server.settings import listen_unix

FORKSERVER = "RLHF_FORKSERVER"
"""The environment variable by which orchestrators find it: the path of its Unix socket."""
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Else glibc keeps up to 64 MB for each thread that has freed them, also of a process that parks (malloc_trim(3))."""
READ = re.compile("PYTHON|LD_|MALLOC_|CUDA|NVIDIA|TORCH|PYTORCH|HF_|HUGGINGFACE|TRANSFORMERS|HOME$|XDG_|LANG|LC_|TZ$")
KINDS = ("generate", "reward", "environment", "reference", "train")
ASKS_S, ANSWERS_S = 10.0, 60.0
"""How long a client may take to say what it wants, and waits for an answer."""


def identity(env: Mapping[str, str]) -> str:
    """Of a process that begins now with `env`: what it would load, and what it is held to."""
    code = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sysconfig.get_path("purelib"))]
    loaded = [(str(path), (stat := path.stat()).st_mtime_ns, stat.st_size) for path in code]
    read = sorted((name, value) for name, value in env.items() if READ.match(name))
    held = [os.readlink(f"/proc/self/ns/{space}") for space in ("mnt", "net", "pid", "user")]
    limits = Path("/proc/self/limits").read_text()
    return sha256(repr((sys.executable, loaded, read, held, limits)).encode()).hexdigest()


@contextlib.contextmanager
def keep(env: Mapping[str, str]) -> Iterator[str]:
    """A forkserver with `env`, until the block or this process ends; its path."""
    directory = tempfile.mkdtemp(prefix="rlhf-forkserver-")
    path = f"{directory}/socket"
    with listen_unix(path) as listener:
        words = [sys.executable, "-m", "functions.server.forkserver", path, str(listener.fileno())]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True,
            env={**env, **ONE_HEAP},
        )  # fmt: skip
    with process:  # closes its standard input, and waits
        yield path


def ask(path: str, arguments: Sequence[str], env: Mapping[str, str], client: socket.socket, log: int) -> None:
    """Has the forkserver at `path` fork an agent, told `arguments`, that serves `client` and writes to the descriptor
    `log`. Raises OSError, in a line, where it does not."""
    wanted = {"identity": identity(env), "arguments": list(arguments), "env": dict(env), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWERS_S)
        asking.connect(path)
        socket.send_fds(asking, [b" "], [client.fileno(), log])
        asking.sendall(json.dumps(wanted).encode())
        asking.shutdown(socket.SHUT_WR)
        if (answer := asking.recv(4096)) != b"forked":
            raise ConnectionRefusedError(answer.decode() or "the forkserver has ended")


class Forkserver:
    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.identity = listener, identity(os.environ)
        self.loaded = False

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents
        while select.select([0, self.listener], [], [])[0] == [self.listener]:
            connection, _ = self.listener.accept()
            connection.settimeout(ASKS_S)
            with connection, contextlib.suppress(OSError, ValueError):
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
                try:
                    if refused := self.answer(connection, *descriptors):
                        connection.sendall(refused.encode())
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)

    def answer(self, connection: socket.socket, client: int, log: int) -> str:
        """Why not, if it does not fork."""
        wanted = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
        if wanted["identity"] != self.identity:
            return "it has other code, or another environment or other limits"
        if not self.loaded:
            from functions.server.agent import preload

            preload(KINDS, None)
            gc.collect()
            gc.freeze()
            self.loaded = True
        if os.fork() == 0:
            self.listener.close()
            become_agent(wanted, connection, client, log)
        return ""


def become_agent(wanted: Mapping[str, Any], asking: socket.socket, client: int, log: int) -> NoReturn:
    """Of the one that asks, if it still does."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asking.sendall(b"forked")
        asking.close()
        for target, source in enumerate((client, log, log)):
            os.dup2(source, target)
        os.close(client)
        os.close(log)
        from functions.server.agent import ONE_THREAD, main

        os.environ.clear()
        os.environ.update(wanted["env"], **ONE_THREAD)
        os.chdir(wanted["directory"])
        sys.path[0], tempfile.tempdir = wanted["directory"], None
        main(wanted["arguments"], loaded=KINDS)
        status = 0
    except SystemExit as end:
        print(end, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    path, listener = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    try:
        Forkserver(listener).serve()
    finally:
        shutil.rmtree(Path(path).parent, ignore_errors=True)
