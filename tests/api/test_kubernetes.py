"""The launcher that makes Kubernetes Jobs, against a server that keeps and answers Jobs as the cluster's API does."""

from __future__ import annotations

import base64
import copy
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes
import pytest

from orchestrator.api.launch_kubernetes import RUNNER_LABEL, KubernetesLauncher, job_manifest, owners
from orchestrator.api.server import ServeOptions, build
from orchestrator.base.errors import ConfigError, RunError
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative.manifests import STORES, JobContext, service

TEMPLATE = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"labels": {"app.kubernetes.io/component": "runner"}},
    "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "runner", "image": "o"}]}}},
}
PATH = "/apis/batch/v1/namespaces/rl/jobs"
URL = "s3://bucket/jobs"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/rl/leases/api"


class Cluster(ThreadingHTTPServer):
    """`batch/v1` Jobs and Secrets of one namespace; a foreground deletion keeps a Job listed until `collect`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.lease: dict[str, Any] = {"metadata": {"resourceVersion": "1"}}
        self.forbid = False

    def collect(self) -> None:
        self.jobs = {k: v for k, v in self.jobs.items() if "deletionTimestamp" not in v["metadata"]}


class Handler(BaseHTTPRequestHandler):
    server: Cluster

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = job["metadata"]["name"]
        if self.server.forbid:
            self._answer(403, {"kind": "Status", "reason": "Forbidden"})
        elif name in self.server.jobs:
            self._answer(409, {"kind": "Status", "reason": "AlreadyExists"})
        else:
            job["metadata"]["uid"] = f"uid-{name}"
            self.server.jobs[name] = job
            self._answer(201, job)

    def do_PATCH(self) -> None:
        """A merge of nothing reads; an apply is all of its manager's object."""
        patch = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = urlsplit(self.path).path.removeprefix("/api/v1/namespaces/rl/secrets/")
        if self.path.startswith(LEASE):
            self._merge_lease(patch)
            return
        if patch:
            assert self.headers["content-type"] == "application/apply-patch+yaml"
            self.server.secrets[name] = patch
        found = self.server.secrets.get(name)
        self._answer(404 if found is None else 200, found or {"kind": "Status", "message": "not found"})

    def _merge_lease(self, patch: dict[str, Any]) -> None:
        held = self.server.lease
        if patch["metadata"]["resourceVersion"] != held["metadata"]["resourceVersion"]:
            self._answer(409, {"kind": "Status", "message": "the object has been modified"})
        else:
            version = {"resourceVersion": str(int(held["metadata"]["resourceVersion"]) + 1)}
            self.server.lease = {"metadata": version, "spec": held.get("spec", {}) | patch["spec"]}
            self._answer(200, self.server.lease)

    def do_GET(self) -> None:
        leases = self.path.startswith(LEASE)
        self._answer(200, self.server.lease if leases else {"kind": "JobList", "items": self._selected()})

    def do_DELETE(self) -> None:
        for job in self._selected():
            job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _selected(self) -> list[dict[str, Any]]:
        parts = urlsplit(self.path)
        assert parts.path == PATH
        key, _, value = parse_qs(parts.query)["labelSelector"][0].partition("=")
        found = [job for job in self.server.jobs.values() if key in job["metadata"]["labels"]]
        return [job for job in found if not value or job["metadata"]["labels"][key] == value]

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def launcher(cluster: Cluster) -> Iterator[KubernetesLauncher]:
    configuration = kubernetes.client.Configuration(host=f"http://127.0.0.1:{cluster.server_address[1]}")
    configuration.retries = 0
    with kubernetes.client.ApiClient(configuration) as client:
        yield KubernetesLauncher(Path("/runs"), TEMPLATE, "rl", kubernetes.client.BatchV1Api(client), URL)


def test_the_manifest_of_a_launch() -> None:
    made = job_manifest(TEMPLATE, "tiny-0123456789", 2, Path("/runs"), URL)
    assert made["metadata"]["name"] == "tiny-0123456789-2"
    assert made["metadata"]["labels"] == {"app.kubernetes.io/component": "runner", RUNNER_LABEL: "tiny-0123456789"}
    assert made["spec"]["template"]["metadata"]["labels"] == {RUNNER_LABEL: "tiny-0123456789"}
    assert made["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "resume",
        "/runs/tiny-0123456789",
        "--keep-output",
        f"--store={URL}",
    ]
    assert RUNNER_LABEL not in json.dumps(TEMPLATE), "the template stays as it is"
    assert re.fullmatch(
        r"[a-z0-9-]{1,63}", job_manifest(TEMPLATE, "x" * 48, 10**9, Path("/r"), URL)["metadata"]["name"]
    )


def test_a_runner_and_its_functions_hold_their_jobs_secret_and_not_the_releases() -> None:
    template = copy.deepcopy(TEMPLATE)
    sources = [{"secretRef": {"name": "stores"}}, {"secretRef": {"name": "more"}}]
    template["spec"]["template"]["spec"]["containers"][0]["envFrom"] = sources  # type: ignore[index]
    pod = job_manifest(template, "tiny-0123456789", 2, Path("/runs"), URL, "stores")["spec"]["template"]["spec"]
    [runner] = pod["containers"]
    own = "tiny-0123456789-stores"
    assert runner["envFrom"] == [{"secretRef": {"name": own}}, {"secretRef": {"name": "more"}}]
    assert pod["volumes"] == [{"name": "own-stores", "secret": {"secretName": own}}]
    assert runner["volumeMounts"] == [{"name": "own-stores", "mountPath": "/run/rlhf-stores", "readOnly": True}]
    [told] = runner["env"]
    assert told["name"] == STORES
    config = KnativeConfig(image="i", env_secrets=("stores", "more"))
    context = JobContext("tiny-0123456789", "redis://x", "tiny-0123456789", 60.0, config, stores=told["value"])
    made = service(context, FunctionSpec("reward", "reward"))["spec"]["template"]["spec"]
    [function] = made["containers"]
    assert function["envFrom"] == runner["envFrom"]
    assert pod["volumes"][0] in made["volumes"]
    assert runner["volumeMounts"][0] in function["volumeMounts"]


@pytest.mark.parametrize("name", ["a", "ab", "abc", "rlhf-ü"])
def test_launches_belong_to_the_account_that_the_pods_token_names(name: str) -> None:
    """A claim as Kubernetes makes it; base64url without padding (RFC 7515, section 2)."""
    claims = {"sub": "system:x", "kubernetes.io": {"namespace": "n", "serviceaccount": {"name": name, "uid": "4-2"}}}
    payload = base64.urlsafe_b64encode(json.dumps(claims, ensure_ascii=False).encode()).decode().rstrip("=")
    expected = {"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": "4-2"}
    assert owners(f"eyJhbGciOiJSUzI1NiJ9.{payload}.c2ln") == [expected]


@pytest.mark.parametrize("token", ["", "opaque", "a.b.c", "a.e30.c", "a.W10.c"])
def test_a_token_that_names_no_account_makes_no_owner(token: str) -> None:
    assert owners(token) == []


def test_a_job_lives_until_it_completes_or_its_pods_are_gone(launcher: KubernetesLauncher, cluster: Cluster) -> None:
    launcher.start("a", 1)
    launcher.start("a", 1)
    launcher.start("b", 1)
    assert list(cluster.jobs) == ["a-1", "b-1"], "a repeated start makes no second one"
    assert launcher.alive(["a", "b", "c"]) == {"a", "b"}
    assert launcher.alive(["a"]) == {"a"}
    cluster.jobs["b-1"]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    assert launcher.alive(["a", "b"]) == {"a"}
    launcher.start("b", 2)
    assert launcher.alive(["a", "b"]) == {"a", "b"}
    launcher.stop("a")
    assert launcher.alive(["a"]) == {"a"}, "its pod is still ending"
    cluster.collect()
    assert launcher.alive(["a"]) == frozenset()
    launcher.stop("a")


def test_what_the_cluster_refuses_is_one_line(launcher: KubernetesLauncher, cluster: Cluster) -> None:
    cluster.forbid = True
    with pytest.raises(RunError, match=r"job a cannot be launched: .*403.*; grant the API's service account create"):
        launcher.start("a", 1)


def test_a_cluster_that_is_away_is_one_line(launcher: KubernetesLauncher, cluster: Cluster) -> None:
    cluster.shutdown()
    cluster.socket.close()
    with pytest.raises(RunError, match="jobs cannot be listed: the cluster's API is away"):
        launcher.alive(["a"])


@pytest.mark.parametrize("text", ["kind: Deployment", "[", "kind: Job\nspec: {template: {spec: {containers: []}}}"])
def test_a_template_that_is_no_job(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match="Job manifest"):
        KubernetesLauncher.connect(tmp_path, tmp_path / "job.yaml", URL)


@pytest.mark.parametrize("defaults", [None, '{"platform": {"kind": "local"}}', '{"limits": {"call_s": 60}}'])
def test_runners_on_a_cluster_have_no_local_functions(tmp_path: Path, defaults: str | None) -> None:
    """A runner's pod would otherwise be where every function of a job works."""
    (tmp_path / "job.yaml").write_text(json.dumps(TEMPLATE))
    (tmp_path / "defaults.json").write_text(defaults or "")
    file = None if defaults is None else tmp_path / "defaults.json"
    with pytest.raises(ConfigError, match=r'--job-template: .* platform.kind = "knative"'):
        build(ServeOptions(tmp_path / "runs", (tmp_path,), defaults=file, job_template=tmp_path / "job.yaml"))
