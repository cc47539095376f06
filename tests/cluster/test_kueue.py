"""Replicas under the quota of a Kueue LocalQueue, on a cluster that has Kueue with its integration `pod`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from functions.base.wire import Call
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.knative.api import ApiError, Json
from orchestrator.platforms.knative.manifests import JobContext
from tests.cluster.conftest import Release, until
from tests.cluster.test_platform import Figures, awaited, context, knative, refused, run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
GROUP = "/apis/kueue.x-k8s.io"
REWARD = FunctionSpec("reward", "reward", max_replicas=2, memory_gb=0.5)


def cluster_queue(version: str, name: str, pods: int) -> Json:
    quota = {"pods": pods, "cpu": 100, "memory": "100G"}
    flavor = {"name": name, "resources": [{"name": what, "nominalQuota": str(most)} for what, most in quota.items()]}
    spec: Json = {
        "namespaceSelector": {}, "resourceGroups": [{"coveredResources": list(quota), "flavors": [flavor]}],
    }  # fmt: skip
    return {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def queued(release: Release, ingress: str) -> Iterator[tuple[JobContext, str]]:
    """A job with a queue, whose ClusterQueue is at the path."""
    try:
        version = release.api.get(GROUP)["preferredVersion"]["groupVersion"]
    except ApiError:
        pytest.skip("the cluster has no Kueue")
    here = context(release, ingress)
    name = here.job
    local = f"namespaces/{release.namespace}/localqueues"
    made: list[tuple[str, dict[str, Any]]] = [
        ("resourceflavors", {"kind": "ResourceFlavor", "spec": {}}),
        ("clusterqueues", cluster_queue(version, name, 1)),
        (local, {"kind": "LocalQueue", "spec": {"clusterQueue": name}}),
    ]
    for kind, value in made:
        release.api.create(f"/apis/{version}/{kind}", value | {"apiVersion": version, "metadata": {"name": name}})
    here = replace(here, config=here.config.model_copy(update={"queue": name}))
    yield here, f"/apis/{version}/clusterqueues/{name}"
    for kind, _ in reversed(made):
        release.api.delete(f"/apis/{version}/{kind}/{name}")


def test_replicas_beyond_the_quota_wait_and_what_is_let_go_frees_it(
    release: Release, queued: tuple[JobContext, str], figures: Figures
) -> None:
    here, path = queued

    def admitted() -> int:
        return int(release.api.get(path).get("status", {}).get("admittedWorkloads", 0))

    async def test() -> None:
        async with knative(here, REWARD) as platform:
            await platform.scale("reward", 2)
            waits = lambda: [replica.waits for replica in platform.replicas() if replica.waits]  # noqa: E731
            states = lambda: sorted(replica.state for replica in platform.replicas())  # noqa: E731
            await awaited(lambda: states() == ["idle", "starting"] and len(waits()) == 1)
            assert f"waits for quota of LocalQueue {here.job}" in waits()[0]
            assert len(platform.usage()) == 1, "what is gated costs nothing"
            assert (await refused(platform, "a")).kind == "error", "the other one answers"
            release.api.merge(path, {"spec": cluster_queue("", here.job, 2)["spec"]})
            figures("quota_to_ready_s", round(await awaited(lambda: states() == ["idle", "idle"]), 1))
            assert not waits()
            assert (await refused(platform, "b")).kind == "error"
            await asyncio.sleep(9)  # a stage longer than the autoscaler's window
            await platform.scale("reward", 0)
            figures("queued_pods_gone_s", round(await awaited(lambda: not platform.replicas()), 1))
            until(lambda: admitted() == 0, 30)

    run(test())


def test_a_call_that_waits_for_quota_longer_than_knatives_deadline_goes_on(
    release: Release, queued: tuple[JobContext, str]
) -> None:
    here, path = queued
    here = replace(here, config=here.config.model_copy(update={"start_s": 60.0}), capacity_s=600.0)
    release.api.merge(path, {"spec": cluster_queue("", here.job, 0)["spec"]})

    async def test() -> None:
        async with knative(here, REWARD) as platform:
            await platform.scale("reward", 1)
            asked = asyncio.create_task(first(platform.call("reward", Call("a", "nothing"))))
            await asyncio.sleep(90)
            assert [replica.state for replica in platform.replicas()] == ["starting"]
            assert not asked.done()
            release.api.merge(path, {"spec": cluster_queue("", here.job, 1)["spec"]})
            assert await asked == "started"

    async def first(events: Any) -> str:
        kinds = [event.kind async for event in events]
        return str(kinds[0])

    run(test())
