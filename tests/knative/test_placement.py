"""Where pods go whose function's state lies on a node: agents' labels, and what a scheduler makes of them."""

from __future__ import annotations

from typing import Any

from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import KubeApi
from orchestrator.platforms.knative.lease import Lease
from orchestrator.platforms.knative.placement import Homes
from orchestrator.platforms.knative.platform import KnativePlatform
from tests.knative.conftest import Start
from tests.knative.control_plane import ControlPlane
from tests.knative.objects import Cluster
from tests.knative.test_platform import context, count, knative, live, run
from tests.support.waiting import eventually

AGENTS = {"node_agent": "/agent"}


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


async def start(plane: ControlPlane, platform: KnativePlatform, name: str) -> dict[str, Any]:
    """What a replica says that starts from zero; it is gone when this returns."""
    await platform.scale("count", 1)
    said = [event.data async for event in platform.call("count", count(name)) if event.kind == "started"]
    await platform.scale("count", 0)
    await eventually(lambda: live(plane) == 0)
    return dict(said[0])


def label(plane: ControlPlane, node: str, key: str, run: str) -> None:
    plane.ask(lambda c: c.objects["pods", f"agent-{node}"]["metadata"]["labels"].update({key: run}))


def patched(plane: ControlPlane) -> list[str]:
    """Agents that were, one after the other."""
    return plane.ask(lambda cluster: [name for _, kind, name in cluster.writes if name.startswith("agent")])


def test_a_function_comes_back_to_the_node_where_it_was(control_plane: Start) -> None:
    plane = two_nodes(control_plane)
    label(plane, "b", manifests.home_key("dead", "train"), "gone")
    key = manifests.home_key("job", "count")

    async def test() -> None:
        async with knative(plane, **AGENTS) as platform:
            revisions = plane.ask(lambda cluster: list(cluster.revisions))
            told = [await start(plane, platform, name) for name in "pq"]
            assert [(said["node"], said["strange"]) for said in told] == [("a", False)] * 2
            assert homes(plane) == {"a": {key: "a1"}, "b": {}}, "and what no lease stands behind is gone"
            assert patched(plane) == ["agent-b", "agent-a"], "once, not with every start"
            plane.ask(lambda cluster: cluster.nodes.remove("a"))  # drained
            said = await start(plane, platform, "r")
            assert (said["node"], said["strange"]) == ("b", True)
            assert homes(plane) == {"a": {}, "b": {key: "a1"}}
            assert plane.ask(lambda cluster: list(cluster.revisions)) == revisions
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
