"""Functions as tickets of a node's agent, on a real cluster: `pytest -m cluster -s tests/cluster/test_parked.py`.

A second release with nodeAgent.enabled, whose functions ask for a resource that the tests give the first node: the
scheduler arbitrates as it does for GPUs. Its claims are its own: where nothing provisions, it wants two more volumes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.platforms.knative.api import ApiError, core
from tests.cluster.conftest import ARITHMETIC, Release, installed, until
from tests.cluster.test_faults import drained
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
HITS, MISSES, EVICTIONS = (f"rlhf_agent_{what}_total" for what in ("hits", "misses", "evictions"))
BUDGET = "rlhf_agent_parked_bytes_limit"
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
    await asyncio.sleep(20)  # longer than Knative's window: no function has a pod when it is over
    samples = step.generate()
    step.train("actor", samples, step.reward(samples))
"""
TICKETS: dict[str, Any] = {
    "deterministic": True, "steps": 3, "planner": {"policy": "static"},
    "functions": {name: {"gpus": 1} for name in ("generate", "train")},
}  # fmt: skip


PAUSES = TICKETS | {"recipe": "paused.py:paused", "steps": 2}


def values(given: Mapping[str, Any]) -> list[str]:
    return [word for pair in given.items() for word in ("--set", "{}={}".format(*pair))]


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's files, with the recipe."""
    files = shutil.copytree(ARITHMETIC, tmp_path_factory.mktemp("paused") / "files")
    (files / "paused.py").write_text(PAUSED)
    return files


@pytest.fixture(scope="module")
def parking() -> Iterator[Release]:
    with installed("parked", *values(VALUES)) as release:
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
    release: Release, parking: Release, figures: Figures, paused: Path
) -> None:
    without = {key: value for key, value in TICKETS.items() if key != "functions"}
    plain = release.post("plain", paused, recipe="paused.py:paused", **without)
    until(lambda: said(parking), 300)
    before = said(parking)
    id = parking.post("tickets", paused, recipe="paused.py:paused", **TICKETS)
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


@pytest.fixture(scope="module")
def history(parking: Release, paused: Path) -> list[Any]:
    """Of the job that nothing happens to."""
    id = parking.post("undisturbed", paused, **PAUSES)
    job = parking.ended(id)
    assert job["state"] == "succeeded", job["message"]
    return parking.history(id)


def _parked(parking: Release, id: str, at_least: int = 1) -> None:
    until(lambda: said(parking).get(PARKED, 0) >= at_least, 300)


def _wakes(parking: Release, id: str) -> None:
    """A ticket has come for a process that is parked."""
    _parked(parking, id)
    until(lambda: any("nodeName" in pod["spec"] for pod in parking.pods(id, "generate")), 300)


MOMENTS: dict[str, Callable[[Release, str], object]] = {
    "working": lambda parking, id: until(lambda: working(parking, id), 300),
    "parking": lambda parking, id: until(
        lambda: any("deletionTimestamp" in pod["metadata"] for pod in parking.pods(id)), 300
    ),
    "parked": _parked,
    "waking": _wakes,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_agent_that_is_killed_at_any_moment_changes_nothing(
    parking: Release, paused: Path, history: list[Any], moment: str
) -> None:
    """The call is made again: by another process, in the pod itself where the agent is not back yet."""
    id = parking.post("killed", paused, **PAUSES)
    MOMENTS[moment](parking, id)
    for pod in agents(parking):
        parking.api.delete(core(parking.namespace, "pods", pod["metadata"]["name"]), grace_s=0)
    over(parking, id, history)


@pytest.mark.parametrize("fault", ["pod", "process", "drain"])
def test_what_is_taken_while_it_works_changes_nothing(
    parking: Release, paused: Path, history: list[Any], fault: str
) -> None:
    id = parking.post("taken", paused, **PAUSES)
    until(lambda: working(parking, id), 300)
    if fault == "process":
        kill_processes(parking)
    elif fault == "drain":
        drained(parking, id)
    else:
        for pod in working(parking, id):
            parking.api.delete(core(parking.namespace, "pods", pod["metadata"]["name"]), grace_s=0)
    over(parking, id, history)


def over(parking: Release, id: str, history: list[Any]) -> None:
    job = parking.ended(id)
    assert job["state"] == "succeeded", job["message"]
    assert parking.history(id) == history
    until(lambda: parking.pods(id) == [] and said(parking).get(PARKED, 0) + said(parking).get(WORKING, 0) == 0, 90)


def ticket(parking: Release, like: dict[str, Any], name: str, **env: str) -> str:
    """What a pod of its own with the function's container says of its process; `env` in place of the container's."""
    [container] = [c for c in like["spec"]["containers"] if c["name"] == "function"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    kept = [pair for pair in container["env"] if pair["name"] not in env]
    own = {key: value for key, value in container.items() if key not in ("lifecycle", "readinessProbe")}
    own["env"] = [*kept, *({"name": key, "value": value} for key, value in env.items())]
    spec = {
        "containers": [own], "restartPolicy": "Never", "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "volumes": [volume for volume in like["spec"]["volumes"] if volume["name"] in mounted],
    }  # fmt: skip
    pods, log = core(parking.namespace, "pods"), ["kubectl", "logs", "-n", parking.namespace, name]
    parking.api.create(pods, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    heard: list[str] = []

    def told() -> bool:
        done = subprocess.run(log, capture_output=True, text=True, timeout=60, check=False)
        heard[:] = [line for line in done.stdout.splitlines() if "node's agent" in line]
        return bool(heard)

    until(told, 60)
    return heard[0].partition("node's agent ")[2]


def test_one_parked_process_goes_to_one_ticket_and_to_none_of_another_job(
    parking: Release, paused: Path, history: list[Any]
) -> None:
    """The stranger's pod has everything of the job's but its token."""
    id = parking.post("wanted", paused, **PAUSES)
    until(lambda: working(parking, id), 300)
    like = working(parking, id)[0]
    _parked(parking, id, 2)  # generate and train
    names = [f"{id}-{n}" for n in range(3)]
    try:
        with ThreadPoolExecutor() as pool:
            stranger = pool.submit(ticket, parking, like, names[0], RLHF_TOKEN="guessed")
            assert stranger.result() == "is new"
            parking.api.delete(core(parking.namespace, "pods", names[0]), grace_s=0)
            two = [pool.submit(ticket, parking, like, name) for name in names[1:]]
            assert sorted(one.result() for one in two) == ["is new", "was parked"]
    finally:
        for name in names:
            with suppress(ApiError):
                parking.api.delete(core(parking.namespace, "pods", name), grace_s=0)
    over(parking, id, history)


def test_where_nothing_fits_the_agents_budget_functions_start_anew(
    parking: Release, paused: Path, history: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "values.yaml").write_text("nodeAgent: {parkedGb: 0.01}")
    others = {key: value for key, value in VALUES.items() if key != "nodeAgent.parkedGb"}
    with installed("parked", *values(others), "-f", str(tmp_path / "values.yaml")) as full:
        until(lambda: said(full).get(BUDGET) == 1e7 and said(full)[WORKING] == 0, 300)
        id = full.post("full", paused, **PAUSES)
        over(full, id, history)
        found = said(full)
        assert (found[HITS], found[PARKED]) == (0, 0)
        assert found[EVICTIONS] >= 2
    with installed("parked", *values(VALUES)):
        until(lambda: said(parking).get(BUDGET) == 6e9, 300)
