"""Two nodes: functions come back to the ones with their state: `pytest -m cluster -s tests/cluster/test_placement.py`.

A release with nodeAgent.enabled; both nodes are given a resource of which generate and train ask for one each. Skipped
where the cluster has one node that its agents run on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator.platforms.knative.api import core
from tests.cluster.conftest import ARITHMETIC, ENDED, Release, installed
from tests.cluster.test_parked import PAUSED, TICKETS, values

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
RESOURCE, HOME = "example.com/place", "home.rlhf-orchestrate/"
VALUES = {
    "nodeAgent.enabled": True, "nodeAgent.hostPath": "/var/lib/rlhf-place", "nodeAgent.parkedGb": 4,
    "nodeAgent.tierGb": 2, "nodeAgent.resources.requests.memory": "256Mi", "functions.gpuResource": RESOURCE,
}  # fmt: skip
AGENTS = "app.kubernetes.io/instance=place,app.kubernetes.io/component=node-agent"


def kubectl(*words: str) -> None:
    subprocess.run(["kubectl", *words], check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def place() -> Iterator[Release]:
    with installed("place", *values(VALUES)) as release:
        nodes = homes(release)
        if len(nodes) < 2:
            pytest.skip(f"needs agents on two nodes, they are on {', '.join(nodes)}")
        patch = [{"op": "add", "path": f"/status/capacity/{RESOURCE.replace('/', '~1')}", "value": "8"}]
        for node in nodes:
            kubectl("patch", "node", node, "--subresource=status", "--type=json", f"-p={json.dumps(patch)}")
        yield release


def homes(release: Release) -> dict[str, set[str]]:
    """The labels of each node's agent."""
    agents = release.api.get(core(release.namespace, "pods"), labelSelector=AGENTS)["items"]
    labels = {agent["spec"]["nodeName"]: agent["metadata"]["labels"] for agent in agents}
    return {node: {key for key in has if key.startswith(HOME)} for node, has in labels.items()}


def starts(release: Release, id: str, meanwhile: Callable[[int], object] = lambda _step: None) -> dict[str, list[str]]:
    """The nodes of generate's and train's ready replicas, one after the other, until the job is over."""
    seen: dict[str, tuple[str, str]] = {}
    while (job := release.job(id))["state"] not in ENDED:
        meanwhile(-1 if job["step"] is None else job["step"])
        for pod in release.pods(id):
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())):
                function = pod["metadata"]["labels"]["rlhf-orchestrate/function"]
                seen.setdefault(pod["metadata"]["name"], (function, pod["spec"]["nodeName"]))
    assert job["state"] == "succeeded", job["message"]
    return {name: [node for of, node in seen.values() if of == name] for name in ("generate", "train")}


def test_functions_come_back_to_their_nodes_and_go_on_elsewhere(
    place: Release, figures: Callable[[str, object], None], tmp_path: Path
) -> None:
    """At zero between stages. While its third step is made, generate's node takes no pods."""
    files = shutil.copytree(ARITHMETIC, tmp_path / "files")
    (files / "paused.py").write_text(PAUSED)
    settings = TICKETS | {"recipe": "paused.py:paused", "steps": 4}
    plain = place.post("plain", files, **settings)
    undisturbed = starts(place, plain)
    figures("nodes of starts", undisturbed)
    assert all(len(set(nodes)) == 1 for nodes in undisturbed.values()), "all at home"
    closed: list[str] = []

    def cordon(step: int) -> None:
        if step == 2 and not closed:
            closed.append(next(node for node, keys in homes(place).items() if any("generate" in k for k in keys)))
            kubectl("cordon", closed[0])
        if step > 2:
            kubectl("uncordon", closed[0])

    try:
        id = place.post("drained", files, **settings)
        nodes = starts(place, id, cordon)
    finally:
        for node in closed:
            with suppress(subprocess.CalledProcessError):
                kubectl("uncordon", node)
    figures("nodes of starts, one closed for a step", nodes)
    assert set(nodes["generate"][:2]) == set(closed)
    assert len(set(nodes["generate"])) == 2, "it went on elsewhere"
    assert nodes["generate"][-1] != closed[0], "and stayed there, with its state"
    assert place.history(id) == place.history(plain)
    assert not any(homes(place).values()), "nothing is left of jobs that are over"
