"""What a replica is told at its start, by command line or environment.

    python -m functions.server --kind generate --options '{"device": "auto"}' --exchange redis://... --job NAME

| option        | environment      | default        |                                                          |
|---------------|------------------|----------------|----------------------------------------------------------|
| --kind        | RLHF_KIND        | (required)     | generate, reward, reference, train, or a class           |
| --options     | RLHF_OPTIONS     | {}             | JSON object: keyword arguments of the function           |
| --exchange    | RLHF_EXCHANGE    | (required)     | URL of the exchange                                      |
| --job         | RLHF_JOB         | (required)     | the job's name: its root in the exchange                 |
| --function    | RLHF_FUNCTION    | the kind       | its function's name in the job: generate, critic, ...    |
| --name        | RLHF_NAME        | the host name  | name of this replica                                     |
| --port        | PORT             | 8080           | TCP port on all interfaces                               |
| --uds         |                  |                | a Unix socket's path instead                             |
| --fd          |                  |                | an inherited listening socket instead                    |
| --threads     | RLHF_THREADS     | 1              | threads of the numeric libraries                         |
| --heartbeat-s | RLHF_HEARTBEAT_S | 2              | seconds between heartbeats, 5 at most                    |
| --grace-s     | RLHF_GRACE_S     | 30             | how long after SIGTERM the process will be left alive    |
| --scratch     | RLHF_SCRATCH     | a new folder   | directory of the replica's own                           |
|               | RLHF_TOKEN       | none           | bearer token that calls must carry                       |
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """See the table at the head of this module."""

    kind: str
    exchange: str
    job: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    heartbeat_s: float = 2.0
    grace_s: float = 30.0
    scratch: str = ""
    token: str = ""
    function: str = ""
    leased: bool = False
    """Parked, the process ends when the job's orchestrator has given no sign of life (wire.ALIVE) for its lifetime."""
    stuck_s: float = 60.0
    """How long a cancelled call may go on before the process, of no use any more, ends itself."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"--threads is {self.threads}, wants 1 or more")
        if not 0 < self.heartbeat_s <= 5:
            raise ValueError(f"--heartbeat-s is {self.heartbeat_s:g}, wants more than 0 and at most 5")
        if not self.grace_s > 0:
            raise ValueError(f"--grace-s is {self.grace_s:g}, wants more than 0")

    def command_line(self) -> list[str]:
        """Of `python -m functions.server`; the token travels by environment."""
        told = {f"--{f.name.replace('_', '-')}": getattr(self, f.name) for f in fields(self) if f.name != "token"}
        told["--options"] = json.dumps(dict(self.options))
        return [str(word) for pair in told.items() for word in pair]

    @classmethod
    def from_command_line(cls, arguments: Sequence[str]) -> tuple[Settings, Address]:
        """Exits with one line on standard error and status 2 when an argument is missing or wrong."""
        parser = argparse.ArgumentParser(prog="python -m functions.server", description="One replica of a function.")
        otherwise = {"options": "{}", "name": socket.gethostname()}
        for name, read in _READ.items():
            said = os.environ.get(f"RLHF_{name.upper()}", otherwise.get(name, getattr(cls, name, None)))
            parser.add_argument(f"--{name.replace('_', '-')}", type=read, default=said, required=said is None)
        parser.add_argument("--port", type=int, default=os.environ.get("PORT", "8080"))
        parser.add_argument("--uds")
        parser.add_argument("--fd", type=int)
        given = vars(parser.parse_args(arguments))
        where = Address(given.pop("port"), given.pop("uds"), given.pop("fd"))
        try:
            return cls(**given, token=os.environ.get("RLHF_TOKEN", "")), where
        except ValueError as error:
            parser.error(str(error))


def _options(text: str) -> Mapping[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"wants a JSON object, got {text!r}")
    return options


_READ: Mapping[str, Callable[[str], Any]] = {
    "kind": str, "exchange": str, "job": str, "options": _options, "function": str, "name": str, "threads": int,
    "heartbeat_s": float, "grace_s": float, "leased": lambda word: word == "True", "stuck_s": float, "scratch": str,
}  # fmt: skip
"""How each of Settings is read from its option or environment variable."""


@dataclass(frozen=True)
class Address:
    """Where a replica listens: the first of fd, uds, port that is given."""

    port: int = 8080
    uds: str | None = None
    fd: int | None = None

    def listen(self) -> socket.socket:
        """A bound, listening socket: connections made before the server runs wait for it."""
        if self.fd is not None:
            return socket.socket(fileno=self.fd)
        if self.uds is not None:
            return listen_unix(self.uds)
        return socket.create_server(("", self.port), backlog=128)


def listen_unix(path: str) -> socket.socket:
    """A listening Unix socket at `path`, replacing one that lies there."""
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    return listener


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends (Linux: prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(f"parent {parent} is gone")
