"""Any cluster with Knative that KUBECONFIG points to, with the chart installed by the tests (docs/knative.md).

KUBECONFIG       the cluster; helm and kubectl have to be on the PATH
RLHF_VALUES      values files for the chart, separated by ":" (images, storage; valkey and seaweedfs enabled)
RLHF_NAMESPACE   namespace of the release (default: rlhf-test); it is made, and stays
RLHF_INGRESS     URL of Knative's internal ingress as this machine reaches it; without it, kubectl forwards a port to
                 service kourier-internal
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.api.upload import send_files
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative.api import KubeApi, core, serving

ROOT = Path(__file__).parents[2]
ARITHMETIC = ROOT / "examples" / "arithmetic"
RELEASE = "rlhf"
ENDED = ("succeeded", "failed", "cancelled")


@dataclass
class Release:
    """An installed chart, and how to reach it."""

    namespace: str
    api: KubeApi
    client: httpx.Client
    defaults: dict[str, Any]
    """Of every job: defaults.json of the release."""

    def post(self, name: str, files: Path = ARITHMETIC, **settings: Any) -> str:
        """The id of an arithmetic job, sent to the API with its `files`."""
        job: dict[str, Any] = {
            "name": name, "steps": 2, "model": {"path": "model"},
            "data": {"train": "train.jsonl", "prompts_per_step": 32},
            "reward": {"score": "reward.py:compute_score"},
            "rollout": {"n": 8, "max_response_length": 20, "engine": "torch"},
            "validation": {"every": 0, "at_start": False}, "train": {"lr": 5e-4}, "limits": {"call_s": 600.0},
            "telemetry": {"tensorboard": False},
        }  # fmt: skip
        job |= settings
        send_files(self.client, job, files)
        answer = self.client.post("/v1/jobs", json=job)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"/v1/jobs/{id}").json()
        return found

    def ended(self, id: str, limit_s: float = 600) -> dict[str, Any]:
        until(lambda: self.job(id)["state"] in ENDED, limit_s)
        return self.job(id)

    def history(self, id: str) -> list[Any]:
        """What was committed: the metrics that depend on the samples and the weights."""
        names = ("critic/score/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss")
        found = self.client.get(f"/v1/jobs/{id}/metrics").json()
        return [found["metrics"].get(name) for name in names]

    def pods(self, id: str, function: str | None = None) -> list[dict[str, Any]]:
        only = "rlhf-orchestrate/function" if function is None else f"rlhf-orchestrate/function={function}"
        selector = f"rlhf-orchestrate/job={id},{only}"
        items: list[dict[str, Any]] = self.api.get(core(self.namespace, "pods"), labelSelector=selector)["items"]
        return items

    def named(self, kind: str, id: str) -> list[str]:
        found = self.api.get(serving(self.namespace, kind), labelSelector=f"rlhf-orchestrate/job={id}")
        return sorted(item["metadata"]["name"] for item in found["items"])

    def config(self, ingress: str) -> KnativeConfig:
        return KnativeConfig.model_validate(self.defaults["platform"]["knative"] | {"ingress": ingress})


def until(condition: Callable[[], object], limit_s: float, told: Callable[[], str] = str) -> float:
    """Seconds until the condition held; `told` says more where it does not."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, f"not within {limit_s:g} s {told()}"
        time.sleep(0.1)
    return time.monotonic() - began_s


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Of the workers of a session, and of sessions on this machine, one at a time: helm refuses a second."""
    with (Path(tempfile.gettempdir()) / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def forwarded(namespace: str, service: str, port: int) -> Iterator[str]:
    """The URL at which `kubectl port-forward` reaches a service."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        local = free.getsockname()[1]
    command = ["kubectl", "port-forward", "-n", namespace, f"service/{service}", f"{local}:{port}"]
    over = threading.Event()
    said: list[str] = []

    def forward() -> None:
        """Again and again: it ends with the connection to the API server."""
        while not over.is_set():
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
                while process.poll() is None and not over.wait(0.1):
                    pass
                process.terminate()
                said.append(process.communicate()[1])

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        until(lambda: _answers(local), 30, lambda: "".join(said[-1:]))
        yield f"http://127.0.0.1:{local}"
    finally:
        over.set()
        thread.join()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class Patient(httpx.HTTPTransport):
    """Asks again while the API's pod, or what forwards a port to it, is being replaced."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(60 if request.method == "GET" else 0):
            try:
                return super().handle_request(request)
            except httpx.TransportError:
                time.sleep(1)
        return super().handle_request(request)


@contextmanager
def installed(name: str, *values: str) -> Iterator[Release]:
    """The chart as release `name` of the tests' namespace, with further `values` for helm; it stays."""
    missing = [name for name in ("KUBECONFIG", "RLHF_VALUES") if name not in os.environ]
    if missing:
        pytest.skip(f"needs a cluster: set {', '.join(missing)} (tests/cluster/conftest.py says how)")
    namespace = os.environ.get("RLHF_NAMESPACE", "rlhf-test")
    files = [word for file in os.environ["RLHF_VALUES"].split(":") for word in ("-f", file)]
    chart = str(ROOT / "charts" / "rlhf-orchestrate")
    helm = ["helm", "upgrade", name, chart, "--install", "-n", namespace, "--create-namespace", "--wait"]
    with locked(f"rlhf-helm-{namespace}"):
        done = subprocess.run([*helm, *files, *values], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    api = KubeApi()
    full = f"{name}-rlhf-orchestrate"
    tokens = base64.b64decode(api.get(core(namespace, "secrets", f"{full}-tokens"))["data"]["tokens"]).decode()
    token = next(words[2] for words in map(str.split, tokens.splitlines()) if words[1:2] == ["write"])
    defaults = json.loads(api.get(core(namespace, "configmaps", f"{full}-config"))["data"]["defaults.json"])
    with forwarded(namespace, f"{full}-api", 80) as url:
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, timeout=30, transport=Patient(retries=8)) as client:
            yield Release(namespace, api, client, defaults)


@pytest.fixture(scope="session")
def release() -> Iterator[Release]:
    with installed(RELEASE) as found:
        yield found


@pytest.fixture(scope="session")
def ingress() -> Iterator[str]:
    if "RLHF_INGRESS" in os.environ:
        yield os.environ["RLHF_INGRESS"]
    else:
        with forwarded("kourier-system", "kourier-internal", 80) as url:
            yield url


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """Records a figure, and prints it (`pytest -s`): docs/knative.md has those of our runs."""

    def tell(name: str, value: object) -> None:
        record_property(name, value)
        print(f"\nfigure: {name} = {json.dumps(value)}", flush=True)

    return tell
