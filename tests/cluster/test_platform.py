"""The Knative platform itself on a real cluster, driven from here: `pytest -m cluster -s tests/cluster`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from functions.base.wire import Call, Event
from orchestrator.platforms.base import FunctionSpec, PlatformError
from orchestrator.platforms.knative.api import core
from orchestrator.platforms.knative.manifests import JobContext, service
from orchestrator.platforms.knative.platform import KnativePlatform
from orchestrator.platforms.knative.scale import Timing
from tests.cluster.conftest import Release, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
Figures = Callable[[str, object], None]
REWARD = FunctionSpec("reward", "reward", max_replicas=3, memory_gb=0.5)
ROUNDS = 5


def context(release: Release, ingress: str) -> JobContext:
    job = f"t{uuid.uuid4().hex[:8]}"
    return JobContext(job, release.defaults["exchange"]["url"], job, 300.0, release.config(ingress))


@asynccontextmanager
async def knative(
    here: JobContext, *specs: FunctionSpec, timing: Timing | None = None
) -> AsyncIterator[KnativePlatform]:
    platform = KnativePlatform(here, timing=timing)
    try:
        await platform.deploy(specs or [REWARD])
        yield platform
    finally:
        await platform.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 600))


async def awaited(condition: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    while not condition():
        await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def refused(platform: KnativePlatform, call: str) -> Event:
    """A call that reaches the function and ends at once: it has no such operation."""
    return [event async for event in platform.call("reward", Call(call, "nothing"))][-1]


def test_zero_to_first_event_and_back(release: Release, ingress: str, figures: Figures) -> None:
    """And the same for a bare pod of the same container, which Knative has no part in, turn by turn."""
    here = context(release, ingress)

    async def test() -> None:
        async with knative(here) as platform:
            assert release.pods(here.job) == []
            first: list[float] = []
            bare: list[float] = []
            tail: list[float] = []
            pods: list[int] = []
            for n in range(ROUNDS):
                bare.append(await asyncio.to_thread(bare_start, release, here))
                began_s = time.monotonic()
                await platform.scale("reward", 1)
                answer = platform.call("reward", Call(f"c{n}", "nothing"))
                assert (await anext(answer)).kind == "started"
                first.append(time.monotonic() - began_s)
                assert [event.kind async for event in answer][-1] == "error"
                await asyncio.sleep(9)  # a stage longer than the autoscaler's window
                await platform.scale("reward", 0)
                tail.append(await awaited(lambda: not platform.replicas()))
                pods.append(len(platform.usage()) - sum(pods))
            for name, values in (("zero_to_first_event_s", first), ("bare_s", bare), ("to_pods_gone_s", tail)):
                figures(name, [round(value, 2) for value in values])
            figures("pods_paid_for", pods)
            assert min(tail) < 10, "a pod that Knative removes itself drains for half a minute"

    run(test())


def bare_start(release: Release, here: JobContext) -> float:
    """Seconds from the creation of a pod with the function's container to its liveness answer, by its terminal state.

    The pod runs the container alone; a client in its own process waits for the server and then ends the pod.
    """
    spec = service(here, REWARD)["spec"]["template"]["spec"]
    container = spec["containers"][0] | {"readinessProbe": {"httpGet": {"path": "/healthz/ready", "port": 8080}}}
    name = f"{here.job}-bare-{uuid.uuid4().hex[:4]}"
    kept = {key: spec[key] for key in ("volumes", "serviceAccountName", "automountServiceAccountToken") if key in spec}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": kept | {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1},
    }  # fmt: skip
    container["readinessProbe"]["periodSeconds"] = 1
    began_s = time.monotonic()
    release.api.create(core(release.namespace, "pods"), pod)
    path = core(release.namespace, "pods", name)

    def ready() -> bool:
        status = release.api.get(path).get("status", {})
        return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))

    try:
        until(ready, 120)
        return time.monotonic() - began_s
    finally:
        release.api.delete(path, grace_s=1)


def test_scale_makes_no_new_revision(release: Release, ingress: str, figures: Figures) -> None:
    here = context(release, ingress)

    async def test() -> None:
        async with knative(here) as platform:
            found: dict[int, list[float]] = {1: [], 3: []}
            gone: list[float] = []
            for _ in range(ROUNDS):
                for wanted in (1, 3):
                    await platform.scale("reward", wanted)
                    ready = lambda n=wanted: sum(r.state == "idle" for r in platform.replicas()) == n  # noqa: E731
                    found[wanted].append(round(await awaited(ready), 2))
                await platform.scale("reward", 1)
                gone.append(round(await awaited(lambda: len(platform.replicas()) == 1), 2))
            figures("to_1_ready_s", found[1][0])
            figures("1_to_3_ready_s", found[3])
            figures("3_to_1_gone_s", gone)
            figures("pods_paid_for", len(platform.usage()))
            assert release.named("revisions", here.job) == [f"{here.job}-reward-00001"]
            assert (await refused(platform, "after")).kind == "error"

    run(test())


WORKER = """
import asyncio, json, sys
from functions.base.wire import Call
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.knative.platform import KnativePlatform
from orchestrator.platforms.knative.manifests import JobContext

async def main():
    job, exchange, config = json.loads(sys.argv[1])
    platform = KnativePlatform(JobContext(job, exchange, job, 300.0, KnativeConfig.model_validate(config)))
    await platform.deploy([FunctionSpec("reward", "reward", memory_gb=0.5)])
    await platform.scale("reward", 1)
    async for event in platform.call("reward", Call("a", "nothing")):
        print(event.kind, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_an_orchestrator_that_is_killed_leaves_nothing(release: Release, ingress: str, figures: Figures) -> None:
    """SIGKILL: nobody is left to scale the function down; its lease runs out."""
    here = context(release, ingress)
    told = json.dumps([here.job, here.exchange, here.config.model_dump(mode="json", exclude_none=True)])
    with subprocess.Popen([sys.executable, "-c", WORKER, told], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "started\n"
        worker.kill()
    assert len(release.pods(here.job)) == 1
    zero_s = until(lambda: release.pods(here.job) == [] and release.named("services", here.job) == [], 120)
    figures("orchestrator_killed_to_zero_s", round(zero_s, 1))
    assert zero_s < 60


def test_an_unschedulable_function_is_told_in_one_line(release: Release, ingress: str) -> None:
    async def test() -> None:
        huge = FunctionSpec("reward", "reward", cpus=4096.0)
        async with knative(context(release, ingress), huge, timing=Timing(pending_s=5.0)) as platform:
            await platform.scale("reward", 1)
            with pytest.raises(PlatformError, match=r"has no node.*Insufficient cpu.*-> free or add nodes") as told:
                await refused(platform, "a")
            assert len(str(told.value).splitlines()) == 1

    run(test())
