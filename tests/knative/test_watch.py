"""The watch over pods: what ends it is raised, not lost with its thread."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.platforms.base import PlatformError
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative.api import KubeApi
from orchestrator.platforms.knative.manifests import JobContext
from orchestrator.platforms.knative.watch import PodWatch
from tests.knative.conftest import Start
from tests.support.kubeconfig import kubeconfig

CONTEXT = JobContext("job", "dir:///x", "job", 600.0, KnativeConfig(image="functions"))
pytestmark = pytest.mark.timeout(60)


def test_a_list_that_cannot_be_understood_ends_the_watch_in_one_line(control_plane: Start) -> None:
    control_plane()
    told: list[str] = []

    def cannot(kind: str, _value: dict[str, Any]) -> None:
        told.append(kind)
        raise KeyError("labels")

    async def run() -> None:
        watch = PodWatch(KubeApi(None), CONTEXT, cannot)
        for waiting in (watch.ready(), watch.supervise()):
            with pytest.raises(PlatformError, match="the job's pods has ended: KeyError: 'labels'"):
                await waiting

    asyncio.run(run())
    assert told == ["SYNC"], "nothing is applied after that"


class Answers(BaseHTTPRequestHandler):
    """With something else than Kubernetes' list of pods."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"items": []}')


def test_a_thread_that_dies_ends_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, f"http://127.0.0.1:{server.server_address[1]}")))

    async def run() -> None:
        watch = PodWatch(KubeApi(None), CONTEXT, lambda _kind, _value: None)
        with pytest.raises(PlatformError, match="KeyError: 'metadata'"):
            await watch.supervise()

    try:
        asyncio.run(run())
    finally:
        server.shutdown()
        server.server_close()
