"""Where pods go whose function's state lies on a node: agents' labels, and what a scheduler makes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from functions.base.wire import Event
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import KubeApi
from orchestrator.platforms.knative.lease import Lease
from orchestrator.platforms.knative.placement import Homes
from orchestrator.platforms.knative.platform import KnativePlatform
from tests.knative.conftest import Start
from tests.knative.control_plane import ControlPlane
from tests.knative.objects import Cluster
from tests.knative.test_platform import context, count, knative, run
from tests.support.waiting import eventually

AGENTS: dict[str, Any] = {"node_agent": "/agent"}


def agent(cluster: Cluster, node: str) -> None:
    labels = {"app.kubernetes.io/part-of": "rlhf-orchestrate", "app.kubernetes.io/component": "node-agent"}
    value = {"metadata": {"name": f"agent-{node}", "labels": labels}, "spec": {"nodeName": node}, "status": {}}
    cluster.objects["pods", f"agent-{node}"] = value


def two_nodes(start: Start) -> ControlPlane:
    plane = start()

    def make(cluster: Cluster) -> None:
        cluster.features, cluster.nodes = {"affinity"}, ["a", "b"]
        agent(cluster, "a")
        agent(cluster, "b")

    plane.ask(make)
    return plane


def homes(plane: ControlPlane) -> dict[str, dict[str, str]]:
    """The labels of each node's agent."""

    def read(cluster: Cluster) -> dict[str, dict[str, str]]:
        found = {v["spec"]["nodeName"]: v["metadata"]["labels"] for (k, _), v in cluster.objects.items() if k == "pods"}
        return {node: {k: v for k, v in has.items() if k.startswith(manifests.HOME)} for node, has in found.items()}

    return plane.ask(read)


async def begun(platform: KnativePlatform, name: str) -> tuple[AsyncIterator[Event], dict[str, Any]]:
    """A call that goes on until it is closed, and what its replica has said of itself."""
    events = platform.call("count", count(name, 1, pause_s=60))
    return events, dict((await anext(events)).data)


def label(plane: ControlPlane, node: str, key: str, run: str) -> None:
    plane.ask(lambda c: c.objects["pods", f"agent-{node}"]["metadata"]["labels"].update({key: run}))


def patched(plane: ControlPlane) -> list[str]:
    """Agents that were, one after the other."""
    return plane.ask(lambda cluster: [name for _, kind, name in cluster.writes if name.startswith("agent")])


def test_a_functions_pods_go_where_it_has_been(control_plane: Start) -> None:
    """Others go to the two nodes in turns."""
    plane = two_nodes(control_plane)
    label(plane, "b", manifests.home_key("dead", "train"), "gone")
    key = manifests.home_key("job", "count")

    async def test() -> None:
        async with knative(plane, **AGENTS) as platform, AsyncExitStack() as calls:
            for number, place in enumerate(["a", "a", "b"], 1):
                if place == "b":
                    plane.ask(lambda cluster: cluster.nodes.remove("a"))  # drained
                await platform.scale("count", number)
                call, said = await begun(platform, f"call-{number}")
                calls.push_async_callback(call.aclose)  # type: ignore[attr-defined]
                assert (said["node"], said["strange"]) == (place, place == "b")
                has = {"b": {key: "a1"}} if place == "b" else {"b": {}}  # no lease stands behind the dead run's
                await eventually(lambda has=has: homes(plane) == {"a": {key: "a1"}} | has)  # type: ignore[misc]
            assert sorted(patched(plane)) == ["agent-a", "agent-b", "agent-b"], "not with every start"
            assert plane.ask(lambda cluster: len(cluster.revisions)) == 1
        assert homes(plane) == {"a": {}, "b": {}}, "the job is over"

    run(test())


def test_labels_follow_a_functions_replicas(control_plane: Start) -> None:
    """The other run has the same job's name: what is its own stays."""
    plane = two_nodes(control_plane)
    key, other = manifests.home_key("job", "count"), manifests.home_key("job", "train")
    label(plane, "a", other, "b2")
    api = KubeApi()
    ours = Homes(api, context(plane, run="a1", **AGENTS))

    async def test() -> None:
        await ours.moved("count", frozenset("ab"), found=False)
        assert homes(plane) == {"a": {key: "a1", other: "b2"}, "b": {key: "a1"}}
        assert not ours.strange("count", "b")
        await ours.moved("count", frozenset("b"), found=True)
        assert homes(plane) == {"a": {other: "b2"}, "b": {key: "a1"}}
        assert ours.strange("count", "a")
        assert not ours.strange("train", "a"), "nothing is known of it"
        plane.ask(lambda cluster: agent(cluster, "b"))  # another pod, without labels
        await ours.moved("count", frozenset("b"), found=True)
        assert homes(plane)["b"] == {}, "its process was there: nobody looked"
        await ours.moved("count", frozenset("b"), found=False)
        assert homes(plane)["b"] == {key: "a1"}
        plane.away = True
        await ours.moved("count", frozenset("a"), found=False)  # a preference: nothing fails
        plane.away = False
        await ours.moved("count", frozenset("a"), found=False)
        assert homes(plane) == {"a": {key: "a1", other: "b2"}, "b": {}}
        await ours.forget()
        assert homes(plane) == {"a": {other: "b2"}, "b": {}}

    run(test())


def test_what_a_killed_orchestrator_left_goes_when_the_next_job_comes(control_plane: Start) -> None:
    plane = two_nodes(control_plane)
    lives = Lease(KubeApi(), context(plane, run="b2"), 60.0)
    label(plane, "a", manifests.home_key("x", "train"), "b2")
    label(plane, "a", manifests.home_key("y", "train"), "dead")

    async def test() -> None:
        await lives.take()
        await Homes(KubeApi(), context(plane, run="a1", **AGENTS)).sweep()
        assert homes(plane) == {"a": {manifests.home_key("x", "train"): "b2"}, "b": {}}

    run(test())
