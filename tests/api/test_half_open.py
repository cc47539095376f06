"""Requests that never become whole, in hundreds, at a server that may open few files."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.api.conftest import WRITE, serving

HEAD = b"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\n"
TOKEN = b"authorization: Bearer %s\r\ncontent-type: application/json\r\n" % WRITE.encode()
HALVES = (b"", HEAD, HEAD + b"content-length: 1000\r\n\r\n{", HEAD + TOKEN + b"content-length: 1000\r\n\r\n{")
"""Nothing, headers, a body, a body of one who may send it."""


def test_a_server_answers_among_hundreds_of_half_open_requests(tmp_path: Path, root: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "served" / "runs", root, files=256))
        where = urlsplit(server.url)
        for i in range(400):
            connection = stack.enter_context(closing(socket.create_connection((where.hostname, where.port), 60)))
            connection.sendall(HALVES[i % len(HALVES)])
        for _ in range(3):
            assert httpx.get(f"{server.url}/healthz", timeout=60).json() == {"status": "ok"}
        with server.client() as client:
            assert client.get("/v1/jobs").status_code == 200
        assert "Traceback" not in server.log.read_text()
