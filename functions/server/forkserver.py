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

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from functions.server.agent import ONE_THREAD, main, preload
from functions.server.forkserver_client import identity

KINDS = ("generate", "reward", "environment", "reference", "train")
ASKS_S = 10.0
"""How long a client may take to say what it wants."""


class Forkserver:
    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.identity = listener, identity(os.environ)
        self.loaded = False

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents
        while select.select([0, self.listener.fileno()], [], [])[0] == [self.listener.fileno()]:
            connection, _ = self.listener.accept()
            connection.settimeout(ASKS_S)
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is none of ours
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
