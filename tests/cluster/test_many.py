"""Ten jobs of two tenants at once, on what the cluster has, while what they depend on breaks.

A tenant is a release; where nothing provisions volumes, the second one wants two more.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from orchestrator.platforms.knative.api import ApiError, core
from tests.cluster.conftest import ENDED, RELEASE, Release, installed, until
from tests.cluster.test_faults import PODS, Figures

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
EACH, EVERY_S = 5, 20
JOB, FUNCTION = "rlhf-orchestrate/job", "rlhf-orchestrate/function"


@pytest.fixture
def tenants() -> Iterator[list[Release]]:
    with ExitStack() as stack:
        names = (RELEASE, "tenant")
        found = [stack.enter_context(installed(name, "--set", f"api.maxRunning={EACH}")) for name in names]
        yield found
        subprocess.run(["helm", "uninstall", "tenant", "-n", found[0].namespace], check=True)
        stack.enter_context(installed(RELEASE))


class Count:
    """Seconds of functions' pods by job, by a watch of our own: from bound to a node until the scheduler counts them no
    more, as they are gone or in a terminal phase (Kubernetes, pkg/scheduler/scheduler.go, newPodInformer)."""

    def __init__(self, release: Release) -> None:
        self._api, self._path = release.api, core(release.namespace, "pods")
        self._begun_s: dict[tuple[str, str], float] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self.over.is_set():
            with suppress(ApiError):
                listed = self._api.get(self._path, labelSelector=FUNCTION)
                there = {pod["metadata"]["name"] for pod in listed["items"]}
                for key in [key for key in self._begun_s if key[1] not in there]:
                    self._gone(*key)
                for pod in listed["items"]:
                    self._seen("ADDED", pod)
                version = listed["metadata"]["resourceVersion"]
                query = {"labelSelector": FUNCTION, "resourceVersion": version}
                for event in self._api.watch(self._path, query, 30):
                    if event["type"] == "ERROR":
                        break
                    self._seen(event["type"], event["object"])

    def _seen(self, kind: str, pod: dict[str, Any]) -> None:
        job, name = pod["metadata"]["labels"][JOB], str(pod["metadata"]["name"])
        if kind == "DELETED" or pod["status"].get("phase") in ("Succeeded", "Failed"):
            self._gone(job, name)
        elif "nodeName" in pod["spec"]:
            self._begun_s.setdefault((job, name), time.monotonic())

    def _gone(self, job: str, name: str) -> None:
        begun_s = self._begun_s.pop((job, name), None)
        if begun_s is not None:
            self.seconds[job] += time.monotonic() - begun_s


def test_ten_jobs_of_two_tenants_while_it_breaks(tenants: list[Release], figures: Figures) -> None:
    count = Count(tenants[0])
    began_s = time.monotonic()
    jobs = [(tenant, tenant.post("many", deterministic=True)) for _ in range(EACH) for tenant in tenants]
    faults = list(PODS)
    random.Random(0).shuffle(faults)
    broken = []
    while not all(tenant.job(id)["state"] in ENDED for tenant, id in jobs):
        time.sleep(EVERY_S)
        if faults:
            broken.append(faults.pop())
            namespace, selector = PODS[broken[-1]].split("/", 1)
            path = core(namespace or tenants[0].namespace, "pods")
            for pod in tenants[0].api.get(path, labelSelector=selector)["items"]:
                tenants[0].api.delete(f"{path}/{pod['metadata']['name']}", grace_s=0)
    figures("ten jobs, s", round(time.monotonic() - began_s))
    figures("broken meanwhile", broken)
    ended = [tenant.job(id) for tenant, id in jobs]
    assert [job["state"] for job in ended] == ["succeeded"] * len(jobs), [job["message"] for job in ended]
    histories = [tenant.history(id) for tenant, id in jobs]
    assert all(history == histories[0] for history in histories)
    until(lambda: not any(tenant.pods(id) or tenant.named("services", id) for tenant, id in jobs), 120)
    count.over.set()
    books = [tenant.client.get(f"/v1/jobs/{id}/cost").json()["functions"] for tenant, id in jobs]
    booked = [sum(function["replica_s"] for function in functions.values()) for functions in books]
    counted = [count.seconds[id] for _, id in jobs]
    figures("replica-s booked, counted", [round(sum(booked), 1), round(sum(counted), 1)])
    figures("books over count, by job", [round(one / other, 4) for one, other in zip(booked, counted, strict=True)])
    assert sum(booked) == pytest.approx(sum(counted), rel=0.01)
