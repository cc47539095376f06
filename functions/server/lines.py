"""JSON lines over a socket: how the agent speaks with its clients and with its processes."""

import contextlib
import json
import socket
from typing import Any

from functions.base.wire import Json


class Lines:
    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._rest = b""

    def read(self) -> list[Json] | None:
        """What one read brings; None: the other side is gone. Raises ValueError for a line that is no JSON object."""
        try:
            received = self.socket.recv(1 << 16)
        except ConnectionError:
            received = b""
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [_object(line) for line in lines]

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the read that follows sees the end
            self.socket.sendall(json.dumps(message).encode() + b"\n")


def _object(line: bytes) -> Json:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"a line is no JSON object: {line[:80]!r}")
    return value
