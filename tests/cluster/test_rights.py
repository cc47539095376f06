"""What each of the release's accounts may do, asked of the cluster itself (charts/rlhf-orchestrate/README.md)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, apps, batch, core, serving
from orchestrator.platforms.knative.manifests import (
    JOB_LABEL,
    JobContext,
    annotate,
    lease,
    owned_by,
    secret,
    security,
    service,
)  # fmt: skip
from tests.cluster.conftest import RELEASE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
RIGHTS: dict[str, dict[str, str]] = {
    "api": {
        "jobs.batch": "create deletecollection list",
        "secrets": "create patch",
        "leases.coordination.k8s.io": "get patch",
    },
    "runner": {
        "services.serving.knative.dev": "create delete get patch",
        "revisions.serving.knative.dev": "get patch",
        "podautoscalers.autoscaling.internal.knative.dev": "patch",
        "deployments.apps/scale": "patch",
        "jobs.batch": "create delete patch",
        "pods": "delete get list patch watch",
        "secrets": "create patch",
        "localqueues.kueue.x-k8s.io": "get",
    },
    "functions": {},
}


@pytest.mark.parametrize("account", RIGHTS)
def test_an_account_may_do_what_is_listed_and_nothing_else(release: Release, account: str) -> None:
    user = f"system:serviceaccount:{release.namespace}:{RELEASE}-rlhf-orchestrate-{account}"
    for namespace, expected in ((release.namespace, RIGHTS[account]), ("kube-system", {})):
        command = ["kubectl", "auth", "can-i", "--list", "-n", namespace, "--as", user, "--no-headers"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        found = {}
        for line in done.stdout.splitlines():
            resource, verbs = line.split()[0], line[line.rindex("[") + 1 : line.rindex("]")]
            if not resource.startswith(("[", "self")):  # what everybody may: paths of the API, questions about oneself
                found[resource] = " ".join(sorted(verbs.split()))
        assert found == expected, namespace


MINE, OTHER = "mine-0123456789", "other-0123456789"
OWNER = {"metadata": {"name": "a", "uid": "b"}}


@pytest.fixture
def runner(release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    """The cluster as MINE's runner has it: with a token of the runners' account for a pod of the runner's name."""
    account, name = f"{RELEASE}-rlhf-orchestrate-runner", f"{MINE}-1-abcde"
    pods = core(release.namespace, "pods")
    made = [gated(name, {}, account), *(gated(f"{job}-replica", {JOB_LABEL: job}) for job in (MINE, OTHER))]
    made.append(gated(f"{MINE}-agent", {"app.kubernetes.io/component": "node-agent"}))
    for pod in made:
        release.api.create(pods, pod)
    kubectl = ["kubectl", "-n", release.namespace]
    bound = ["create", "token", account, "--bound-object-kind", "Pod", "--bound-object-name", name]
    token = subprocess.run([*kubectl, *bound], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    view = [*kubectl, "config", "view", "--raw", "--minify", "--flatten", "-o", "json"]
    config = json.loads(subprocess.run(view, capture_output=True, text=True, timeout=60, check=True).stdout)
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    try:
        yield KubeApi()
    finally:
        for pod in made:
            release.api.delete(f"{pods}/{pod['metadata']['name']}", grace_s=0)


def gated(name: str, labels: dict[str, str], account: str = "default") -> Json:
    """A pod that no node gets."""
    container = {"name": "c", "image": "dev.local/none", "securityContext": security(KnativeConfig(image="x"))}
    gates = [{"name": "rlhf-orchestrate/never"}]
    spec = {"serviceAccountName": account, "schedulingGates": gates, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def test_a_runner_writes_what_is_its_jobs_and_nothing_else(release: Release, runner: KubeApi) -> None:
    config = release.config("http://unused")
    [shared] = config.env_secrets
    here = JobContext(MINE, "redis://x", MINE, 60.0, config, stores=f"{shared}={MINE}-stores")
    there = replace(here, job=OTHER)
    spec = FunctionSpec("reward", "reward")
    jobs, secrets = batch(release.namespace, "jobs"), core(release.namespace, "secrets")
    services, pods = serving(release.namespace, "services"), core(release.namespace, "pods")
    tokens = f"{secrets}/{RELEASE}-rlhf-orchestrate-tokens"
    api = apps(release.namespace, "deployments", f"{RELEASE}-rlhf-orchestrate-api")
    service_path, agent = f"{services}/{MINE}-reward", f"{pods}/{MINE}-agent"

    def applied(change: Callable[[Json, Json], object]) -> Callable[[], object]:
        manifest = service(here, spec)
        change(manifest, manifest["spec"]["template"]["spec"])
        return lambda: runner.apply(service_path, manifest, "test")

    def volume(**source: object) -> Callable[[], object]:
        return applied(lambda _whole, pod: pod["volumes"].append({"name": "more", **source}))

    def first(**settings: object) -> Callable[[], object]:
        return applied(lambda _whole, pod: pod["containers"][0].update(settings))

    ungated = lease(here, 60)
    del ungated["spec"]["template"]["spec"]["schedulingGates"]
    account_token = {
        **secret(here, "t"), "type": "kubernetes.io/service-account-token",
        "metadata": secret(here, "t")["metadata"] | {"annotations": {"kubernetes.io/service-account.name": "default"}},
    }  # fmt: skip
    someones = {"secretKeyRef": {"name": "someones", "key": "k"}}
    as_api = {"app.kubernetes.io/instance": RELEASE, "app.kubernetes.io/component": "api"}
    stands = applied(lambda whole, _: whole["spec"]["template"]["metadata"]["labels"].update(as_api))
    own, token, kept = "its own job's label", "only Secret is its job's token", "neither specification nor labels"
    leases, ours, homes = "leases, which never start", "a function's pods are its job's", "where states are"
    refused: dict[str, tuple[str, Callable[[], object]]] = {
        "reads a Secret": ("cannot get resource", lambda: runner.get(tokens)),
        "reads a Secret by a patch": (own, lambda: runner.merge(tokens, {})),
        "makes another job's token": (own, lambda: runner.create(secrets, secret(there, "t"))),
        "makes an account's token": (token, lambda: runner.create(secrets, account_token)),
        "makes a Job that runs": (leases, lambda: runner.create(jobs, ungated)),
        "makes another job's function": (own, lambda: runner.create(services, service(there, spec))),
        "brings an image": (ours, first(image="docker.io/library/evil:1")),
        "brings an image of nearly the same name": (ours, first(image=config.image.rpartition(":")[0] + "-evil:1")),
        "hands a Secret to a function": (ours, first(envFrom=[{"secretRef": {"name": "someones"}}])),
        "hands the release's credentials to a function": (ours, first(envFrom=[{"secretRef": {"name": shared}}])),
        "hands another job's credentials to a function": (
            ours, first(envFrom=[{"secretRef": {"name": f"{OTHER}-stores"}}])),
        "mounts another job's credentials": (ours, volume(secret={"secretName": f"{OTHER}-stores"})),
        "changes its own credentials": (
            own, lambda: runner.merge(f"{secrets}/{MINE}-stores", {"data": {"REDIS_PASSWORD": ""}})),
        "hands a key of a Secret to a function": (ours, first(env=[{"name": "A", "valueFrom": someones}])),
        "mounts a Secret": (ours, volume(secret={"secretName": "someones"})),
        "mounts an account's token": (ours, volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]})),
        "mounts a claim": (ours, volume(persistentVolumeClaim={"claimName": "someones", "readOnly": True})),
        "takes another account": (ours, applied(lambda _whole, pod: pod.update(serviceAccountName="default"))),
        "stands for the API": (ours, stands),
        "changes another job's pod": (own, lambda: runner.merge(f"{pods}/{OTHER}-replica", annotate({"a": "b"}))),
        "deletes another job's pod": (own, lambda: runner.delete(f"{pods}/{OTHER}-replica")),
        "lets a pod start": (kept, lambda: runner.merge(f"{pods}/{MINE}-replica", {"spec": {"schedulingGates": None}})),
        "labels a pod": (kept, lambda: runner.merge(f"{pods}/{MINE}-replica", {"metadata": {"labels": as_api}})),
        "labels a node agent": (kept, lambda: runner.merge(agent, {"metadata": {"labels": as_api}})),
        "gives a node agent an owner": (homes, lambda: runner.merge(agent, owned_by(OWNER))),
        "scales what is not its": (own, lambda: runner.merge(f"{api}/scale", {"spec": {"replicas": 0}})),
    }  # fmt: skip
    release.api.create(secrets, {"metadata": {"name": f"{MINE}-stores"}})
    for what, (why, action) in refused.items():
        with pytest.raises(ApiError) as error:
            action()
        assert why in error.value.message, (what, error.value)

    held = runner.create(jobs, lease(here, 60))
    made = [f"{jobs}/{held['metadata']['name']}", f"{secrets}/{MINE}-token", service_path, f"{secrets}/{MINE}-stores"]
    try:
        runner.create(secrets, secret(here, "t"))
        assert "token" in runner.merge(made[1], {})["data"]
        runner.apply(service_path, service(here, spec), "test")
        runner.merge(service_path, owned_by(held))
        runner.merge(f"{pods}/{MINE}-replica", annotate({"a": "b"}))
        runner.delete(f"{pods}/{MINE}-replica", grace_s=0)
        runner.merge(agent, {"metadata": {"labels": {f"home.rlhf-orchestrate/{MINE}-train": "run"}}})
        runner.delete(service_path)
        runner.delete(made[0])
    finally:
        for path in made:
            release.api.delete(path)
