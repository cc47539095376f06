"""Requests that never become whole, in hundreds, at a server that may open few files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.api.conftest import WRITE, Served, serving

HALVES = {
    "nothing": b"",
    "headers": b"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\n",
    "body": b"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n{",
    "body with a token": b"POST /v1/jobs HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %s\r\n"
    b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{" % WRITE.encode(),
}


@contextmanager
def descriptors(most: int) -> Iterator[None]:
    """Processes that begin in this block may open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def frugal(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Served]:
    runs = tmp_path_factory.mktemp("frugal") / "runs"
    with ExitStack() as stack:
        with descriptors(256):
            server = stack.enter_context(serving(runs, root))
        yield server


@pytest.mark.parametrize("half", HALVES)
def test_a_server_answers_among_hundreds_of_half_open_requests(frugal: Served, half: str) -> None:
    where = urlsplit(frugal.url)
    with ExitStack() as stack:
        for _ in range(400):
            connection = stack.enter_context(closing(socket.create_connection((where.hostname, where.port), 60)))
            connection.sendall(HALVES[half])
        for _ in range(3):
            assert httpx.get(f"{frugal.url}/healthz", timeout=60).json() == {"status": "ok"}
        with frugal.client() as client:
            assert client.get("/v1/jobs").status_code == 200
    assert "Traceback" not in frugal.log.read_text()
