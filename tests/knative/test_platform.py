"""The Knative platform against the stand-in control plane; replicas are real processes."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from functions.base.wire import Call, Event
from functions.exchange.directory import DirectoryExchange
from orchestrator.base.errors import Away
from orchestrator.base.outages import Outages
from orchestrator.calls.invoke import Invoker, Timeouts
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import KubeApi
from orchestrator.platforms.knative.lease import RECENT, Lease
from orchestrator.platforms.knative.manifests import JobContext
from orchestrator.platforms.knative.platform import KnativePlatform
from orchestrator.platforms.knative.scale import Timing
from tests.knative.conftest import Start
from tests.knative.control_plane import PASSED_ON, ControlPlane
from tests.knative.objects import Cluster
from tests.knative.parts import SPEED
from tests.platforms.conformance import Bench, Conformance
from tests.support.waiting import eventually

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"
COUNT = FunctionSpec("count", f"{FUNCTIONS}:Count", max_replicas=4)
FAST = Timing(quiet_s=6 / SPEED, lease_s=6.0, renew_s=1.5, pending_s=2.0, close_s=5.0, ready_s=10.0)


def context(plane: ControlPlane, run: str = "a1", **settings: Any) -> JobContext:
    config = KnativeConfig(**({"image": "functions", "ingress": plane.ingress_url} | settings))
    return JobContext("job", str(plane.root / "exchange"), "job", 600.0, config, run)


@asynccontextmanager
async def knative(
    plane: ControlPlane, *specs: FunctionSpec, timing: Timing = FAST, **settings: Any
) -> AsyncIterator[KnativePlatform]:
    platform = KnativePlatform(context(plane, **settings), timing=timing)
    try:
        await platform.deploy(specs or [COUNT])
        yield platform
    finally:
        await platform.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def count(call: str, n: int = 2, **params: Any) -> Call:
    return Call(call, "count", params={"n": n} | params)


async def waits_and_answers(platform: KnativePlatform, notes: list[str], mend: Callable[[], object]) -> None:
    """To deploy is waited for until `mend` is called, told of in `notes`; then a replica answers."""
    deploying = asyncio.create_task(Outages(note=notes.append).bridge(lambda: platform.deploy([COUNT])))
    await eventually(lambda: len(notes) == 1)
    mend()
    await deploying
    await platform.scale("count", 1)
    assert (await answer(platform, count("a")))[-1].kind == "done"


async def answer(platform: KnativePlatform, call: Call) -> list[Event]:
    return [event async for event in platform.call("count", call) if event.kind not in ("progress", "started")]


def live(plane: ControlPlane) -> int:
    return plane.ask(lambda cluster: sum(not pod.removing for pod in cluster.pods.values()))


class TestKnative(Conformance):
    @pytest.fixture(autouse=True)
    def _plane(self, control_plane: Start) -> None:
        self.plane = control_plane()

    @asynccontextmanager
    async def bench(self) -> AsyncIterator[Bench]:
        exchange = DirectoryExchange(str(self.plane.root / "exchange" / "job"))
        spec = replace(COUNT, max_replicas=3)

        def kill(name: str) -> None:
            process = self.plane.ask(lambda cluster: cluster.pods[name].process)
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)

        async with knative(self.plane, spec) as platform:
            end = lambda call: exchange.put(call.cut_key, b"cut")  # noqa: E731
            yield Bench(platform, spec, lambda name: count(name, 1, pause_s=60), end, kill)


def test_an_api_that_is_away_at_deploy_is_waited_for(control_plane: Start) -> None:
    plane = control_plane()
    notes: list[str] = []

    async def test() -> None:
        outages = Outages(note=notes.append)
        platform = KnativePlatform(context(plane), timing=FAST)
        try:
            plane.away = True
            deploying = asyncio.create_task(outages.bridge(lambda: platform.deploy([COUNT])))
            await eventually(lambda: len(notes) == 1)
            plane.away = False
            await deploying
            await platform.scale("count", 1)
            assert (await answer(platform, count("a")))[-1].kind == "done"
            plane.away = True
            with pytest.raises(Away, match="etcdserver: leader changed"):
                await platform.deploy([COUNT])
            plane.away = False
        finally:
            await platform.close()

    run(test())
    assert notes[0].startswith("waiting for the cluster's API")
    assert "etcdserver: leader changed" in notes[0]
    assert notes[1].startswith("the cluster's API is back")


def test_calls_that_nobody_takes_are_no_lost_attempts(control_plane: Start) -> None:
    """The ingress is gone, or its name is: told apart from a replica that died."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane, ingress="http://127.0.0.1:9") as platform:
            await platform.scale("count", 1)
            with pytest.raises(Away) as caught:
                await answer(platform, count("a"))
            assert caught.value.what == "http://127.0.0.1:9"

    run(test())


def test_an_ingress_with_nobody_behind_it_is_away(control_plane: Start) -> None:
    """Its own answers are told from those of Knative's proxies, who speak for a replica that died."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            plane.instead = Response("no healthy upstream", 503, {"server": "envoy"})
            with pytest.raises(Away, match="503: no healthy upstream"):
                await answer(platform, count("b"))
            plane.instead = Response("EOF", 502, PASSED_ON)
            with pytest.raises(CallLost, match="502: EOF"):
                await answer(platform, count("b"))
            plane.instead = None
            assert (await answer(platform, count("b")))[-1].kind == "done"

    run(test())


def test_nothing_is_left_of_a_job_that_was_closed(control_plane: Start) -> None:
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            assert live(plane) == 0
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            assert live(plane) == 1
        assert plane.ask(lambda cluster: ([kind for kind, _ in cluster.objects], len(cluster.pods))) == ([], 0)

    run(test())


def test_min_scale_of_a_revision_never_active_needs_a_request(control_plane: Start) -> None:
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 3)  # no call: only the wake-up request can make this true
            await eventually(lambda: sum(r.state == "idle" for r in platform.replicas()) == 3)
            await platform.scale("count", 0)
            await eventually(lambda: not platform.replicas())
            plane.ask(Cluster.restart_autoscaler)
            await platform.scale("count", 1)
            await eventually(lambda: sum(r.state == "idle" for r in platform.replicas()) == 1)

    run(test())


def test_scale_makes_no_new_revision_and_spares_busy_replicas(control_plane: Start) -> None:
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 4)
            await eventually(lambda: sum(r.state == "idle" for r in platform.replicas()) == 4)
            calls = [asyncio.create_task(answer(platform, count(f"c{i}", pause_s=1.0))) for i in range(2)]
            await eventually(lambda: sum(r.state == "busy" for r in platform.replicas()) == 2)
            busy = {r.name for r in platform.replicas() if r.state == "busy"}
            await platform.scale("count", 1)  # one less than there are calls: both go on
            await eventually(lambda: len(platform.replicas()) == 2)
            assert {r.name for r in platform.replicas()} == busy
            for call in calls:
                assert (await call)[-1].kind == "done"
            await eventually(lambda: len(platform.replicas()) == 1)
            assert plane.ask(lambda cluster: list(cluster.revisions)) == ["job-count-00001"]
            writes = plane.ask(lambda cluster: [w for w in cluster.writes if w[1] == "services"])
            assert [verb for verb, _, _ in writes] == ["PATCH", "PATCH"], "created, owned; scale is not in it"

    run(test())


def test_idle_replicas_do_not_drain_for_half_a_minute(control_plane: Start) -> None:
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 3)
            await asyncio.gather(*(answer(platform, count(f"c{i}", pause_s=0.3)) for i in range(3)))
            await platform.scale("count", 0)
            await eventually(lambda: not platform.replicas())
        assert plane.ask(lambda cluster: cluster.drained) == []

    run(test())


def test_each_pod_let_go_is_replaced_once_at_most(control_plane: Start) -> None:
    """Its ReplicaSet puts another in its place until its own scale is lowered: that is done once Knative agrees."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 2)
            await asyncio.gather(*(answer(platform, count(f"c{i}", pause_s=0.5)) for i in range(2)))
            await platform.scale("count", 0)
            await eventually(lambda: not platform.replicas())
            assert len(platform.usage()) <= 4

    run(test())


def test_nothing_is_put_back_after_a_short_stage(control_plane: Start, tmp_path: Path) -> None:
    """A pod deleted before its function has been active for a window is replaced, and its successor by another. Each
    of a stage's two has a call."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            for stage in range(3):
                both = tmp_path / f"both{stage}"
                await platform.scale("count", 2)
                calls = [count(f"s{stage}.{i}", hold=0, until=str(both)) for i in range(2)]
                answers = asyncio.gather(*(answer(platform, call) for call in calls))
                await eventually(lambda: [r.state for r in platform.replicas()] == ["busy", "busy"])
                both.touch()
                await answers
                await platform.scale("count", 0)
                await eventually(lambda: not platform.replicas())
            in_vain = [life for life in platform.usage() if life.ready_s is not None and life.busy_s == 0]
            assert in_vain == []
            assert plane.ask(lambda cluster: cluster.drained) == []

    run(test())


def test_a_pod_set_aside_goes_with_the_lease(control_plane: Start) -> None:
    """An orchestrator that dies between setting a pod aside and deleting it leaves no pod that nobody owns."""
    plane = control_plane()

    def expire(cluster: Cluster) -> None:
        [(_, name)] = [key for key in cluster.objects if key[0] == "jobs"]
        [pod] = cluster.pods
        cluster.patch("pods", pod, manifests.set_aside(cluster.objects["jobs", name]), strategic=True)
        cluster.delete("jobs", name, None)

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            [pod] = plane.ask(lambda cluster: list(cluster.pods))
            plane.ask(expire)
            await eventually(lambda: plane.ask(lambda cluster: pod not in cluster.pods))

    run(test())


def test_a_replica_that_is_cut_off_is_replaced(control_plane: Start) -> None:
    """Knative would wait for minutes, and replace nothing: the heartbeat is ours."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 1)
            invoker = Invoker(platform, timeouts=Timeouts(heartbeat_s=1.0))
            seen, stopped = [], False
            async for event in invoker.invoke("count", count("cut-off", 3, pause_s=0.5)):
                if event.kind == "samples":
                    seen.append(event.data["index"])
                if seen and not stopped:
                    [pid] = plane.ask(lambda cluster: [pod.process.pid for pod in cluster.pods.values() if pod.process])
                    os.kill(pid, signal.SIGSTOP)
                    stopped = True
            assert seen == [[0], [1], [2]]

    run(test())


def test_a_replicaset_owns_what_was_taken_out_of_it_until_it_lets_go(control_plane: Start) -> None:
    """It may have sent a deletion of its own a moment before, and starts nothing until it has seen a pod of its own end
    (seen on a cluster: the job stood still)."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            [pod] = plane.ask(lambda cluster: list(cluster.pods))
            await platform.scale("count", 0)
            await eventually(lambda: pod not in plane.ask(lambda cluster: list(cluster.pods)))
            events = plane.ask(lambda cluster: cluster.events)
            told = [value["metadata"] for _, _, value in events if value["metadata"]["name"] == pod]
            aside = [meta["ownerReferences"] for meta in told if manifests.TEMPLATE_HASH not in meta["labels"]]
            assert [owner["kind"] for owner in aside[0]] == ["ReplicaSet", "Job"]
            assert [owner["kind"] for owner in aside[-1]] == ["Job"]

    run(test())


def test_a_replica_that_is_cut_off_between_calls_is_replaced(control_plane: Start) -> None:
    """The next call waits for it at the activator: no attempt of ours is ever lost."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane, timing=replace(FAST, lost_s=0.5)) as platform:
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            [name] = plane.ask(lambda cluster: list(cluster.pods))
            plane.ask(lambda cluster: cluster.cut_off(name))
            assert (await answer(platform, count("b")))[-1].kind == "done"
            assert name not in plane.ask(lambda cluster: list(cluster.pods))

    run(test())


def test_a_request_that_went_astray_is_made_again(control_plane: Start) -> None:
    """Queued at a busy replica while another is idle: no attempt is lost by it."""
    plane = control_plane()

    async def test() -> None:
        async with knative(plane, timing=replace(FAST, astray_s=0.5)) as platform:
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            plane.astray = 2
            assert (await answer(platform, count("b")))[-1].kind == "done"
            assert plane.astray == 0

    run(test())


def test_a_response_that_ran_into_its_limit_is_no_answer(control_plane: Start) -> None:
    plane = control_plane()

    async def test() -> None:
        short = JobContext("job", str(plane.root / "exchange"), "job", 1.0, context(plane).config)
        platform = KnativePlatform(short, timing=FAST)  # 61 s of the cluster, 3 of ours
        try:
            await platform.deploy([COUNT])
            await platform.scale("count", 1)
            with pytest.raises(CallLost, match="not an event line"):
                await answer(platform, count("slow", 1, pause_s=20.0))
        finally:
            await platform.close()

    run(test())


def test_calls_without_the_jobs_token_are_refused(control_plane: Start) -> None:
    plane = control_plane()
    other = base64.b64encode(b"other").decode()

    async def test() -> None:
        async with knative(plane) as platform:
            plane.ask(lambda cluster: cluster.objects["secrets", "job-token"]["data"].update(token=other))
            await platform.scale("count", 1)  # a pod that begins now has it, and ours is none
            with pytest.raises(PlatformError, match=r"401.*token"):
                await answer(platform, count("a"))
        async with knative(plane) as second:  # the Secret went with the first: this one has made its own
            await second.scale("count", 1)
            assert (await answer(second, count("a")))[-1].kind == "done"

    run(test())


def test_an_orchestrator_that_dies_leaves_nothing(control_plane: Start) -> None:
    plane = control_plane()
    child = os.fork()
    if child == 0:

        async def work() -> None:
            platform = KnativePlatform(context(plane), timing=FAST)
            await platform.deploy([COUNT])
            await platform.scale("count", 2)
            await answer(platform, count("long", 1, pause_s=60.0))

        try:
            asyncio.run(work())
        finally:
            os._exit(1)

    async def test() -> None:
        await eventually(lambda: plane.ask(lambda cluster: sum(pod.ready for pod in cluster.pods.values())) == 2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        await eventually(lambda: plane.ask(lambda cluster: not cluster.pods and not cluster.objects))

    run(test())


def test_a_lease_is_short_where_renewals_come_on_time(control_plane: Start) -> None:
    """And long after one that was late: what was late once may be so again."""
    plane = control_plane()
    now_s = 0.0

    async def test() -> None:
        nonlocal now_s
        lease = Lease(KubeApi(), context(plane), 20.0, lambda: now_s)
        await lease.take()
        [name] = _leases(plane)
        left_s = []
        for gap_s in (2, 2, 4, 2, 10, *[2] * RECENT):
            now_s += gap_s
            await lease.renew()
            job = plane.ask(lambda cluster: cluster.objects["jobs", name])
            left_s.append(job["spec"]["activeDeadlineSeconds"] - now_s)
        await lease.drop()
        assert left_s == [6, 6, 12, 12, *[20] * RECENT, 6]

    run(test())


def test_a_lease_lost_while_the_api_was_away_is_taken_again(control_plane: Start) -> None:
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            plane.away = True
            await eventually(lambda: plane.ask(lambda cluster: not cluster.pods and not cluster.objects))
            plane.away = False
            lost = True
            while lost:
                try:
                    lost = (await answer(platform, count("b")))[-1].kind != "done"
                except CallLost:
                    await asyncio.sleep(0.05)

    run(test())


def test_a_second_orchestrator_takes_over_without_a_new_revision(control_plane: Start) -> None:
    plane = control_plane()
    answered = plane.root / "answered"
    child = os.fork()
    if child == 0:

        async def work() -> None:
            first = KnativePlatform(context(plane), timing=replace(FAST, lease_s=600.0, renew_s=200.0))
            await first.deploy([COUNT])
            await first.scale("count", 2)
            await answer(first, count("a"))
            answered.touch()
            await asyncio.Event().wait()

        try:
            asyncio.run(work())
        finally:
            os._exit(1)

    async def test() -> None:
        await eventually(lambda: answered.exists() and _ready(plane) == 2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        [lease] = _leases(plane)
        async with knative(plane) as second:
            await eventually(lambda: [replica.state for replica in second.replicas()] == ["idle", "idle"])
            await eventually(lambda: not second.replicas())  # not wanted by anyone any more
            await second.scale("count", 1)
            await answer(second, count("b"))
            plane.ask(lambda cluster: cluster.objects["jobs", lease]["spec"].update(activeDeadlineSeconds=0))
            await eventually(lambda: lease not in _leases(plane))  # the first one's ran out: it owned nothing
            assert plane.ask(lambda cluster: list(cluster.revisions)) == ["job-count-00001"]
            await answer(second, count("c"))

    run(test())


def _ready(plane: ControlPlane) -> int:
    return plane.ask(lambda cluster: sum(pod.ready for pod in cluster.pods.values()))


def _leases(plane: ControlPlane) -> list[str]:
    return plane.ask(lambda cluster: [name for kind, name in cluster.objects if kind == "jobs"])


@pytest.mark.parametrize(
    ("limits", "settings", "message"),
    [
        ({"slots": 0}, {}, "has no node.*Insufficient nvidia.com/gpu.*-> free or add nodes"),
        ({}, {"image": "missing"}, "image missing cannot be had.*platform.knative.image"),
    ],
)
def test_what_keeps_a_function_from_starting_is_told(
    control_plane: Start, limits: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    plane = control_plane(**limits)

    async def test() -> None:
        async with knative(plane, **settings) as platform:
            await platform.scale("count", 1)
            with pytest.raises(PlatformError, match=message):
                await answer(platform, count("a"))

    run(test())


def test_a_service_that_nobody_makes_ready_is_waited_for(control_plane: Start) -> None:
    plane = control_plane()
    notes: list[str] = []

    async def test() -> None:
        platform = KnativePlatform(context(plane), timing=replace(FAST, ready_s=0.5))
        try:
            plane.ask(lambda cluster: setattr(cluster, "controllers_away", True))
            await waits_and_answers(platform, notes, lambda: plane.ask(lambda c: setattr(c, "controllers_away", False)))
        finally:
            await platform.close()

    run(test())
    assert notes[0].startswith("waiting for Knative's controllers")


def test_a_replica_waits_until_its_queue_admits_it(control_plane: Start) -> None:
    plane = control_plane()
    group, version = "/apis/kueue.x-k8s.io", "kueue.x-k8s.io/v1beta2"

    async def test() -> None:
        with pytest.raises(PlatformError, match=r"platform.knative.queue: 'team-a' is no LocalQueue in namespace def"):
            async with knative(plane, queue="team-a"):
                pass
        plane.statics |= {
            group: {"preferredVersion": {"groupVersion": version}},
            f"/apis/{version}/namespaces/default/localqueues/team-a": {},
        }
        async with knative(plane, queue="team-a") as platform:
            await platform.scale("count", 1)
            answered = asyncio.create_task(answer(platform, count("a")))
            await eventually(lambda: "quota of LocalQueue team-a" in "".join(r.waits for r in platform.replicas()))
            assert not platform.usage(), "what is gated costs nothing"
            plane.ask(lambda cluster: setattr(cluster, "quota", 1))
            assert (await answered)[-1].kind == "done"
            assert [replica.waits for replica in platform.replicas()] == [""]

    run(test())


@pytest.mark.parametrize(
    ("limits", "settings"),
    [({"max_timeout_s": 600}, {}), ({}, {"node_selector": {"gpu": "h100"}, "gpu_nodes_only": False})],
)
def test_what_a_cluster_does_not_allow_points_to_the_doctor(
    control_plane: Start, limits: dict[str, Any], settings: dict[str, Any]
) -> None:
    plane = control_plane(**limits)

    async def test() -> None:
        with pytest.raises(PlatformError, match=r"was refused.*doctor --platform knative"):
            async with knative(plane, **settings):
                pass

    run(test())
