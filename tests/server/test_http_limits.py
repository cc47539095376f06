"""Half-open and oversized requests, on real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from functions.base.http_limits import HEADER_BYTES, bounded_body, limited
from functions.server.app import LARGEST_CALL_BYTES
from tests.server.conftest import Serve

Start = Callable[..., int]
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HALVES = {
    "nothing": b"",
    "headers": b"POST / HTTP/1.1\r\nhost: x\r\n",
    "body": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n123",
    "second": WHOLE + b"GET / HT",
}


AT_WORK, GATE = threading.Event(), threading.Event()


def _held(_request: Request) -> PlainTextResponse:
    AT_WORK.set()
    assert GATE.wait(60)
    return PlainTextResponse("")


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await bounded_body(request, 1 << 20))))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server with limits of its own; gives its port."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def begin(**limits: Any) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        app = Starlette(routes=[Route("/", _echo, methods=["GET", "POST"]), Route("/held", _held)])
        config = uvicorn.Config(app, http=limited(**limits), lifespan="off", log_config=None, ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        running.append((server, thread))
        port: int = listener.getsockname()[1]
        return port

    yield begin
    for server, thread in running:
        server.should_exit = True
        thread.join()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def ask(port: int, request: bytes = WHOLE) -> bytes:
    """All that comes until the server closes, or one answer's headers and body where it keeps the connection."""
    with closing(connect(port)) as connection:
        connection.sendall(request)
        return connection.recv(1000)


def until_closed(connection: socket.socket) -> bytes:
    said = b""
    try:
        while block := connection.recv(4096):
            said += block
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_does_not_become_whole_is_given_up(start: Start, half: str) -> None:
    port = start(headers_s=0.2, body_s=0.2)
    with closing(connect(port)) as connection:
        connection.sendall(HALVES[half])
        said = until_closed(connection)
    assert b"HTTP/1.1 408" in said
    assert said.count(b"HTTP/1.1 200") == (half == "second")


def test_of_those_that_wait_the_oldest_goes(start: Start) -> None:
    port = start(headers_s=600, body_s=600, waiting=8)
    with ExitStack() as stack:
        held = [stack.enter_context(closing(connect(port))) for _ in range(8)]
        for connection, half in zip(held, [*HALVES.values()] * 2, strict=True):
            connection.sendall(half)
        for _ in range(4):
            assert ask(port).startswith(b"HTTP/1.1 200")
        assert b"408" not in until_closed(held[0]), "it was cut, long before its time"
        assert ask(port).startswith(b"HTTP/1.1 200")


def test_a_request_at_work_does_not_wait_in_line(start: Start) -> None:
    """However many half-open ones come, it is answered."""
    port = start(headers_s=600, body_s=600, waiting=4)
    AT_WORK.clear()
    GATE.clear()
    with closing(connect(port)) as slow, ExitStack() as stack:
        slow.sendall(WHOLE.replace(b"/", b"/held", 1))
        assert AT_WORK.wait(60)
        for _ in range(20):
            stack.enter_context(closing(connect(port))).sendall(HALVES["headers"])
        assert ask(port).startswith(b"HTTP/1.1 200"), "all that came before it are in"
        GATE.set()
        assert slow.recv(1000).startswith(b"HTTP/1.1 200")


def test_headers_have_a_size(start: Start) -> None:
    port = start()
    endless = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (2 * HEADER_BYTES)
    assert ask(port, endless).startswith(b"HTTP/1.1 431")
    body = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 262144\r\n\r\n" + b"b" * 262144
    assert ask(port, body).startswith(b"HTTP/1.1 200"), "a body is none of the headers"


@pytest.mark.parametrize("half", ["headers", "body"])
def test_a_replica_answers_among_hundreds_of_half_open_requests(serve: Serve, half: str) -> None:
    served = serve()
    with ExitStack() as stack:
        for _ in range(400):
            connection = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
            connection.connect(served.socket)  # without a timeout: it waits where the backlog is full
            connection.sendall(HALVES[half])
        asking = stack.enter_context(closing(socket.socket(socket.AF_UNIX)))
        asking.connect(served.socket)
        asking.sendall(b"GET /healthz/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert asking.recv(64).startswith(b"HTTP/1.1 200")


def test_a_call_has_a_size(serve: Serve) -> None:
    """Of 400 MB that come in one chunk the server takes as much as a call may have."""
    served = serve()
    head = b"POST /v1/call HTTP/1.1\r\nhost: x\r\n"
    block = b" " * (1 << 20)
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(60)
        connection.connect(served.socket)
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % (400 << 20))
        sent = 0
        try:
            while sent < 400 << 20:
                connection.sendall(block)
                sent += len(block)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert LARGEST_CALL_BYTES <= sent < LARGEST_CALL_BYTES + (32 << 20)
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(60)
        connection.connect(served.socket)
        connection.sendall(head + b"content-length: %d\r\n\r\n" % (400 << 20))
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    assert served.client.get("/healthz/live").status_code == 200
