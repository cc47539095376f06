"""Jobs by POST on a real cluster with the chart installed: `pytest -m cluster -s tests/cluster`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.platforms.knative.api import batch, core
from tests.cluster.conftest import RELEASE, Release, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
Figures = Callable[[str, object], None]


def test_the_release_works(release: Release) -> None:
    """helm test: the API, the exchange's conditional put, a function's round trip with the runner's rights."""
    command = ["helm", "test", RELEASE, "-n", release.namespace, "--logs", "--timeout", "300s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_runs_with_every_function_at_zero_before_and_after(release: Release, figures: Figures) -> None:
    id = release.post("arithmetic")
    until(lambda: len(release.named("services", id)) == 3, 120)
    assert release.pods(id, "train") == []
    job = release.ended(id)
    assert (job["state"], job["step"]) == ("succeeded", 2), job["message"]
    assert release.named("services", id) == []
    figures("ended_to_no_pods_s", round(until(lambda: release.pods(id) == [], 45), 1))
    cost = release.client.get(f"/v1/jobs/{id}/cost").json()
    figures("job_s", cost["wall_s"])
    for name, books in cost["functions"].items():
        figures(f"billed_over_busy/{name}", round(books["replica_s"] / max(books["busy_s"], 1e-9), 2))
    for name, column in release.client.get(f"/v1/jobs/{id}/metrics?name=timing_s/").json()["metrics"].items():
        figures(name, column)


def test_a_pod_killed_in_mid_stage_changes_nothing(release: Release) -> None:
    whole = release.post("whole", deterministic=True)
    assert release.ended(whole)["state"] == "succeeded"
    id = release.post("killed", deterministic=True)
    until(lambda: working(release, id), 200)
    for pod in working(release, id):
        release.api.delete(core(release.namespace, "pods", pod["metadata"]["name"]), grace_s=0)
    job = release.ended(id)
    assert job["state"] == "succeeded", job["message"]
    assert release.history(id) == release.history(whole)


def test_a_gang_of_two_pods_makes_the_update_of_one(release: Release) -> None:
    """They meet at the address of one of them, past the job's NetworkPolicy where the cluster enforces it."""
    ids = [
        release.post(name, steps=1, functions={"train": {"replicas": count}})
        for name, count in (("alone", 1), ("gang", 2))
    ]
    for id in ids:
        job = release.ended(id)
        assert job["state"] == "succeeded", job["message"]
    alone, gang = (release.history(id) for id in ids)
    for (_, expected), (_, found) in zip(alone, gang, strict=True):  # step 0 has no update
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    starts = release.client.get(f"/v1/jobs/{ids[1]}/cost").json()["functions"]["train"]["starts"]
    assert starts >= 2


def test_a_job_goes_on_after_its_runner_was_taken_away(release: Release) -> None:
    """Its functions are gone meanwhile; test_platform.py has an orchestrator that is killed without a word."""
    id = release.post("orphan", limits={"call_s": 600.0, "attempts": 4})
    until(lambda: any(_ready(pod) for pod in release.pods(id)), 200)
    runner = f"rlhf-orchestrate/runner={id}"
    jobs = release.api.get(batch(release.namespace, "jobs"), labelSelector=runner)["items"]
    for job in jobs:  # its pod is not replaced: what is left is the functions
        release.api.merge(batch(release.namespace, "jobs", job["metadata"]["name"]), {"spec": {"suspend": True}})
    for pod in release.api.get(core(release.namespace, "pods"), labelSelector=runner)["items"]:
        release.api.delete(core(release.namespace, "pods", pod["metadata"]["name"]), grace_s=0)
    until(lambda: release.pods(id) == [] and release.named("services", id) == [], 60)
    for job in jobs:
        release.api.merge(batch(release.namespace, "jobs", job["metadata"]["name"]), {"spec": {"suspend": False}})
    assert release.ended(id)["state"] == "succeeded"


def test_an_unschedulable_function_is_told(release: Release) -> None:
    id = release.post("huge", functions={"generate": {"threads": 4096}})

    def told() -> list[Any]:
        return [c for pod in release.pods(id, "generate") for c in pod["status"].get("conditions", ())]

    until(lambda: any(c.get("reason") == "Unschedulable" for c in told()), 120)
    release.client.post(f"/v1/jobs/{id}/cancel")
    assert release.ended(id)["state"] == "cancelled"
    until(lambda: release.pods(id) == [], 60)


def working(release: Release, id: str) -> list[dict[str, Any]]:
    """The job's replicas of generate that are up."""
    return [pod for pod in release.pods(id, "generate") if _ready(pod)]


def _ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
