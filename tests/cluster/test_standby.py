"""Two servers of the API, one of which is lost in the middle of a job: `pytest -m cluster -s tests/cluster`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from orchestrator.api.leader import LEASE_S
from orchestrator.platforms.knative.api import apps, batch, coordination, core
from tests.cluster.conftest import ENDED, RELEASE, Release, until
from tests.cluster.test_jobs import working

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
API = f"{RELEASE}-rlhf-orchestrate-api"


@pytest.fixture
def two(release: Release) -> Iterator[Release]:
    def scale(replicas: int) -> None:
        deployment = apps(release.namespace, "deployments", API)
        release.api.merge(deployment, {"spec": {"replicas": replicas}})
        until(lambda: release.api.get(deployment)["status"].get("readyReplicas") == replicas, 120)

    scale(2)
    yield release
    scale(1)


def leader(release: Release) -> str:
    lease = release.api.get(coordination(release.namespace, "leases", API))
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


@pytest.mark.parametrize("grace_s", [0, 30])
def test_the_one_that_leads_is_lost_in_the_middle_of_a_job(
    two: Release, figures: Callable[[str, object], None], grace_s: int
) -> None:
    alone = two.post("alone", deterministic=True)
    assert two.ended(alone)["state"] == "succeeded"
    id = two.post("led", deterministic=True)
    until(lambda: bool(working(two, id)), 300)
    first = leader(two)
    two.api.delete(core(two.namespace, "pods", first), grace_s=grace_s)
    lost_s = answered_s = time.monotonic()
    silent_s, led_s, state = 0.0, 0.0, ""
    while state not in ENDED:
        assert time.monotonic() < lost_s + 600
        try:
            state = two.job(id)["state"]
        except (httpx.TransportError, KeyError):
            continue
        finally:
            time.sleep(0.1)
        silent_s, answered_s = max(silent_s, time.monotonic() - answered_s), time.monotonic()
        if not led_s and leader(two) not in ("", first):
            led_s = time.monotonic() - lost_s
    figures(f"no answer for, s (grace {grace_s} s)", round(silent_s, 1))
    figures(f"until another leads, s (grace {grace_s} s)", round(led_s, 1))
    assert 0 < led_s < 3 * LEASE_S
    job = two.job(id)
    assert (job["state"], job["executions"]) == ("succeeded", 1), job["message"]
    assert two.history(id) == two.history(alone)
    launches = two.api.get(batch(two.namespace, "jobs"), labelSelector=f"rlhf-orchestrate/runner={id}")["items"]
    assert [launch["metadata"]["name"] for launch in launches] == [f"{id}-1"]
    next_one = two.post("next")
    assert two.ended(next_one)["state"] == "succeeded", "the one that is left starts jobs"
