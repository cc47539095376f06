"""Real server processes on Unix sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from functions.base.wire import Call, Event
from functions.exchange.directory import DirectoryExchange
from tests.support.forked import ForkedServer

FUNCTIONS = Path(__file__).with_name("functions_for_tests.py")


class Served:
    """A server process."""

    def __init__(self, root: Path, kind: str, *arguments: str, stuck_s: float | None = None, **env: str) -> None:
        self.exchange = DirectoryExchange(str(root / "exchange" / "job"))
        self.socket = str(root / f"{len(list(root.glob('*.sock')))}.sock")
        self.kind = f"{FUNCTIONS}:{kind}" if kind in ("Count", "Fails", "NeedsName", "Speaks", "Loads") else kind
        self.log = root / f"{Path(self.socket).stem}.log"
        told = ["--kind", self.kind, "--exchange", str(root / "exchange"), "--job", "job", "--name", "replica"]
        told += ["--uds", self.socket, "--heartbeat-s", "0.1", *arguments]
        self.log.touch()
        self.process = ForkedServer(told, {**os.environ, **env}, self.log, stuck_s)
        transport = httpx.HTTPTransport(uds=self.socket)
        self.client = httpx.Client(transport=transport, base_url="http://replica", timeout=100)

    def wait_ready(self) -> None:
        until_s = time.monotonic() + 100
        while time.monotonic() < until_s:
            assert self.process.poll() is None, self.log.read_text()
            with socket.socket(socket.AF_UNIX) as probe:  # httpx leaves the socket of a refused connection unclosed
                if probe.connect_ex(self.socket) == 0:
                    assert self.client.get("/healthz/ready").status_code == 200
                    return
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self.log.read_text()}")

    def call(self, call: Call) -> list[Event]:
        """The whole answer, heartbeats left out."""
        with self.stream(call) as events:
            return [event for event in events if event.kind != "progress"]

    @contextmanager
    def stream(self, call: Call, **headers: str) -> Iterator[Iterator[Event]]:
        with self.client.stream("POST", "/v1/call", json=call.to_json(), headers=headers) as response:
            if response.status_code != 200:
                response.read()
            assert response.status_code == 200, response.text
            yield (Event.from_line(line) for line in response.iter_lines())

    def post(self, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post("/v1/call", content=content, headers=headers)

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Serve:
    """Starts servers, and stops all of them at the end of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all: list[Served] = []

    def __call__(self, kind: str = "Count", *arguments: str, stuck_s: float | None = None, **env: str) -> Served:
        served = self.start(kind, *arguments, stuck_s=stuck_s, **env)
        served.wait_ready()
        return served

    def start(self, kind: str, *arguments: str, stuck_s: float | None = None, **env: str) -> Served:
        """Without waiting for it."""
        served = Served(self.root, kind, *arguments, stuck_s=stuck_s, **env)
        self.all.append(served)
        return served


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    starter = Serve(tmp_path)
    yield starter
    for served in starter.all:
        served.stop()
