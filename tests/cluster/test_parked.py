"""Functions as tickets of a node's agent, on a real cluster: `pytest -m cluster -s tests/cluster/test_parked.py`.

A second release with nodeAgent.enabled, whose functions ask for a resource that the tests give the first node: the
scheduler arbitrates as it does for GPUs. Its claims are its own: where nothing provisions, it wants two more volumes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.platforms.knative.api import core
from tests.cluster.conftest import ARITHMETIC, Release, installed, until
from tests.cluster.test_jobs import working

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
Figures = Callable[[str, object], None]
RESOURCE, ROOM = "example.com/gpu", 2
VALUES = {
    "nodeAgent.enabled": True, "nodeAgent.hostPath": "/var/lib/rlhf-parked", "nodeAgent.parkedGb": 6,
    "nodeAgent.tierGb": 2, "nodeAgent.resources.requests.memory": "1Gi", "nodeAgent.resources.limits.memory": "12Gi",
    "functions.gpuResource": RESOURCE,
}  # fmt: skip
AGENTS = "app.kubernetes.io/instance=parked,app.kubernetes.io/component=node-agent"
HITS, MISSES = "rlhf_agent_hits_total", "rlhf_agent_misses_total"
PARKED, WORKING = (f'rlhf_agent_processes{{state="{state}"}}' for state in ("parked", "working"))
KILL = """
import os, pathlib
children = lambda pid: pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
for agent in children(1):
    for keeper in children(agent):
        for replica in children(keeper):
            os.kill(int(replica), 9)
"""
PAUSED = """
import asyncio
from orchestrator.recipes.base import recipe

@recipe(paper="", advantage="grpo", loss="vanilla", aggregation="seq-mean-token-mean")
async def paused(step):
    await asyncio.sleep(15)  # longer than Knative's window: no function has a pod when it is over
    samples = step.generate()
    step.train("actor", samples, step.reward(samples))
"""
TICKETS: dict[str, Any] = {
    "deterministic": True, "steps": 3, "planner": {"policy": "static"},
    "functions": {name: {"gpus": 1} for name in ("generate", "train")},
}  # fmt: skip


@pytest.fixture(scope="module")
def parking() -> Iterator[Release]:
    with installed(
        "parked", *(word for pair in VALUES.items() for word in ("--set", "{}={}".format(*pair)))
    ) as release:
        node = release.api.get("/api/v1/nodes")["items"][0]["metadata"]["name"]
        patch = [{"op": "add", "path": "/status/capacity/example.com~1gpu", "value": str(ROOM)}]
        command = ["kubectl", "patch", "node", node, "--subresource=status", "--type=json", f"-p={json.dumps(patch)}"]
        subprocess.run(command, check=True, capture_output=True)
        yield release
        subprocess.run(["helm", "uninstall", "parked", "-n", release.namespace], check=True)


def agents(release: Release) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = release.api.get(core(release.namespace, "pods"), labelSelector=AGENTS)["items"]
    return items


def said(release: Release) -> dict[str, float]:
    """The agent's metrics; nothing while there is no agent."""
    found: dict[str, float] = {}
    for pod in agents(release):
        path = core(release.namespace, "pods", pod["metadata"]["name"])
        command = ["kubectl", "get", "--raw", f"{path}:9464/proxy/metrics"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("rlhf_agent")]
        found |= {name: float(value) for name, value in lines}
    return found


def kill_processes(release: Release) -> None:
    """All replicas that the agent keeps: children of its keepers."""
    name = agents(release)[0]["metadata"]["name"]
    command = ["kubectl", "exec", "-n", release.namespace, name, "--", "python", "-c", KILL]
    subprocess.run(command, check=True, timeout=60)


def test_a_jobs_functions_are_tickets_and_its_numbers_the_same(
    release: Release, parking: Release, figures: Figures, tmp_path: Path
) -> None:
    files = shutil.copytree(ARITHMETIC, tmp_path / "files")
    (files / "paused.py").write_text(PAUSED)
    without = {key: value for key, value in TICKETS.items() if key != "functions"}
    plain = release.post("plain", files, recipe="paused.py:paused", **without)
    until(lambda: said(parking), 300)
    before = said(parking)
    id = parking.post("tickets", files, recipe="paused.py:paused", **TICKETS)
    until(lambda: working(parking, id), 300)
    [container] = [c for c in working(parking, id)[0]["spec"]["containers"] if c["name"] == "function"]
    assert container["resources"]["limits"][RESOURCE] == "1"
    for job, at in ((id, parking), (plain, release)):
        ended = at.ended(job)
        assert ended["state"] == "succeeded", ended["message"]
    assert parking.history(id) == release.history(plain)
    found = {name: value - before[name] for name, value in said(parking).items()}
    figures("starts from parked, new processes", [found[HITS], found[MISSES]])
    assert found[HITS] >= 2, "of three steps each, generate and train come back twice"
    assert found[MISSES] >= 3
    figures("job over to nothing parked, s", round(until(lambda: said(parking)[PARKED] == 0, 60), 1))
    assert parking.pods(id) == []


@pytest.mark.parametrize("fault", ["agent", "pod", "process"])
def test_what_is_killed_while_it_works_changes_nothing(release: Release, parking: Release, fault: str) -> None:
    """The call is made again: by another process, in the pod itself where the agent is not back yet."""
    undisturbed = parking.post("undisturbed", **TICKETS)
    assert parking.ended(undisturbed)["state"] == "succeeded"
    id = parking.post("killed", **TICKETS)
    until(lambda: working(parking, id), 300)
    if fault == "process":
        kill_processes(parking)
    else:
        for pod in working(parking, id) if fault == "pod" else agents(parking):
            parking.api.delete(core(parking.namespace, "pods", pod["metadata"]["name"]), grace_s=0)
    job = parking.ended(id)
    assert job["state"] == "succeeded", job["message"]
    assert parking.history(id) == parking.history(undisturbed)
    until(lambda: parking.pods(id) == [] and said(parking).get(PARKED, 0) + said(parking).get(WORKING, 0) == 0, 90)
