"""What a job depends on breaks in mid-stage, and nobody helps: `scripts/chaos cluster` (docs/reliability.md).

Each fault comes once to a job of its own, when a replica of generate is at work. The job ends by itself, with the
numbers of one that nothing happened to. Settings beside those of conftest.py:

RLHF_S3          namespace/selector of the object store's pods, where it is not the chart's: stores/app=s3
RLHF_RESTART     command that restarts the cluster's API server
RLHF_PARTITION   command that cuts off the pod whose address is its argument, for good
RLHF_PRESSURE    command that has the kubelet see memory pressure for some seconds, and evict

The node is drained of the job's functions alone, and takes pods again after that: where there is one node, what a drain
takes besides would have nowhere to go.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable

import pytest

from orchestrator.platforms.knative.api import core
from tests.cluster.conftest import Release, until
from tests.cluster.test_jobs import working

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
Figures = Callable[[str, object], None]
KNATIVE, INGRESS = "knative-serving", "kourier-system"
PODS = {
    "valkey": "/app.kubernetes.io/component=valkey",
    "s3": os.environ.get("RLHF_S3", "/app.kubernetes.io/component=seaweedfs"),
    "activator": f"{KNATIVE}/app=activator",
    "autoscaler": f"{KNATIVE}/app=autoscaler",
    "controller": f"{KNATIVE}/app=controller",
    "webhook": f"{KNATIVE}/app=webhook",
    "ingress": f"{INGRESS}/app=3scale-kourier-gateway",
    "ingress's controller": f"{KNATIVE}/app=net-kourier-controller",
}
"""Deleted without a grace: namespace (none: the release's) and selector."""
COMMANDS = {"API server": "RLHF_RESTART", "partition": "RLHF_PARTITION", "memory pressure": "RLHF_PRESSURE"}
DRAIN = "drain"


@pytest.fixture(scope="module")
def undisturbed(release: Release) -> tuple[list[object], float]:
    """The history of the job that nothing happens to, and how long it took, s."""
    began_s = time.monotonic()
    id = release.post("undisturbed", deterministic=True)
    job = release.ended(id)
    assert job["state"] == "succeeded", job["message"]
    return release.history(id), time.monotonic() - began_s


def drained(release: Release, id: str) -> None:
    """The node of the job's functions, as by an admin; it is back as the last of them has gone."""
    node = working(release, id)[0]["spec"]["nodeName"]
    only = ["--pod-selector", f"rlhf-orchestrate/job={id}", "--delete-emptydir-data", "--force", "--timeout=180s"]
    try:
        subprocess.run(["kubectl", "drain", node, *only], check=True, timeout=200)
    finally:
        subprocess.run(["kubectl", "uncordon", node], check=True, timeout=60)


@pytest.mark.parametrize("fault", [*PODS, *COMMANDS, DRAIN])
def test_a_job_ends_by_itself(
    release: Release, undisturbed: tuple[list[object], float], figures: Figures, fault: str
) -> None:
    history, alone_s = undisturbed
    if fault in COMMANDS and COMMANDS[fault] not in os.environ:
        pytest.skip(f"needs {COMMANDS[fault]} (tests/cluster/test_faults.py says what)")
    began_s = time.monotonic()
    id = release.post("faulty", deterministic=True)
    until(lambda: working(release, id), 300)
    if fault in PODS:
        namespace, selector = PODS[fault].split("/", 1)
        namespace = namespace or release.namespace
        pods = release.api.get(core(namespace, "pods"), labelSelector=selector)["items"]
        assert pods, f"{PODS[fault]} selects no pod"
        for pod in pods:
            release.api.delete(core(namespace, "pods", pod["metadata"]["name"]), grace_s=0)
    elif fault == DRAIN:
        drained(release, id)
    else:
        command = shlex.split(os.environ[COMMANDS[fault]])
        addresses = [pod["status"]["podIP"] for pod in working(release, id)] if fault == "partition" else []
        subprocess.run([*command, *addresses], check=True, timeout=120)
    job = release.ended(id)
    figures(f"longer than alone, s: {fault}", round(time.monotonic() - began_s - alone_s, 1))
    assert (job["state"], job.get("executions", 1)) == ("succeeded", 1), job["message"]
    assert release.history(id) == history
    until(lambda: release.pods(id) == [] and release.named("services", id) == [], 120)
