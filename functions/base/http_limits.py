"""What a connection may cost a server before anybody knows who is behind it: time, bytes and descriptors.

uvicorn waits for ever for the rest of a request. Here every request has to be whole in time (its headers within
HEADERS_S; its body within BODY_S, and longer only at RATE or faster, as in Apache's mod_reqtimeout), headers have a
size, and of connections that wait for a request, or for the rest of one, the oldest goes when there are too many: who
asks quickly is always answered, however many do not.

    limited_server(app, host=..., port=...).run()
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S = 10.0
BODY_S = 20.0
RATE = 16 << 10
"""Bytes a second of a body that takes longer."""
HEADER_BYTES = 64 << 10
WAITING = 1024
"""Connections at most that wait; fewer where the process may have few descriptors."""


class TooLarge(Exception):
    """A body has more bytes than it may."""


async def bounded_body(request: Request, limit: int) -> bytes:
    """A request's body. Raises TooLarge as soon as it has more than `limit` bytes, ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise TooLarge
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > limit:
            raise TooLarge
    return bytes(body)


def limited_server(app: Any, **more: Any) -> uvicorn.Server:
    """Of an ASGI application, under these limits; `more` of uvicorn.Config."""
    given = {"http": limited(), "backlog": backlog(), "ws": "none", "log_config": None, "access_log": False, **more}
    return uvicorn.Server(uvicorn.Config(app, **given))


def backlog() -> int:
    """Of the listening socket. asyncio accepts as many in one go, before the first of them is known to wait: a few goes
    are to fit beside those that wait."""
    return min(128, _descriptors() // 16)


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def limited(*, headers_s: float = HEADERS_S, body_s: float = BODY_S, waiting: int = 0) -> type[HttpToolsProtocol]:
    """The protocol of one server's connections; `waiting` 0: WAITING, or half of the descriptors there are."""
    most = waiting or min(WAITING, _descriptors() // 2)
    line: dict[Limited, None] = {}
    """Those that wait, oldest first."""

    class Limited(HttpToolsProtocol):
        _due: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _body_bytes = 0
        _body_since_s = 0.0
        _in_body = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait(headers_s)

        def connection_lost(self, exc: Exception | None) -> None:
            self._go_on()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if not self._in_body:
                self._header_bytes += len(data)
            super().data_received(data)
            if self._header_bytes > HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait(headers_s)

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self._header_bytes, self._body_bytes, self._in_body = 0, 0, True
            self._body_since_s = self.loop.time()
            self._wait(body_s)

        def on_body(self, body: bytes) -> None:
            self._body_bytes += len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_body = False
            self._go_on()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete and not self.transport.is_closing():
                self._line_up()  # kept alive, for uvicorn's few seconds

        def _wait(self, seconds: float) -> None:
            self._go_on()
            self._due = self.loop.call_later(seconds, self._late)
            self._line_up()

        def _line_up(self) -> None:
            line.pop(self, None)
            line[self] = None
            if len(line) > most:
                oldest = next(iter(line))
                oldest._go_on()
                oldest.transport.abort()

        def _go_on(self) -> None:
            """Nothing is waited for."""
            line.pop(self, None)
            if self._due is not None:
                self._due.cancel()
                self._due = None

        def _late(self) -> None:
            self._due = None
            if self._in_body:
                left_s = self._body_since_s + body_s + self._body_bytes / RATE - self.loop.time()
                if self.flow.read_paused or left_s > 0:  # it is we who do not read, or it comes fast enough
                    self._due = self.loop.call_later(max(left_s, 1.0), self._late)
                    return
            self._refuse(b"408 Request Timeout")

        def _refuse(self, status: bytes) -> None:
            self._go_on()
            if self.transport.is_closing():
                return
            last = self.cycle
            answering = last is not None and (last.response_started if self._in_body else not last.response_complete)
            if not answering:
                self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    return Limited
