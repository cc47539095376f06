"""Which of several servers starts jobs, by a Lease on a stand-in of the cluster's API."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api.leader import LEADS_S, LEASE_S, RENEW_S, Leader
from orchestrator.platforms.knative.api import ApiError, KubeApi
from tests.api.test_kubernetes import LEASE, Cluster, cluster  # noqa: F401  # a fixture
from tests.support.kubeconfig import kubeconfig


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def servers(cluster: Cluster, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Leader]:  # noqa: F811
    address = f"http://127.0.0.1:{cluster.server_address[1]}"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, address)))
    return [Leader(KubeApi(), "rl", "api", f"pod-{number}", clock) for number in range(2)]


def look(servers: list[Leader], clock: Clock, times: int = 1) -> list[bool]:
    for _ in range(times):
        clock.now_s += RENEW_S
        for server in servers:
            server.look()
    return [server() for server in servers]


def test_one_leads_while_it_renews(servers: list[Leader], clock: Clock) -> None:
    assert look(servers, clock) == [True, False]
    assert look(servers, clock, 30) == [True, False]


def test_at_its_end_the_other_leads_at_once(servers: list[Leader], clock: Clock) -> None:
    one, two = servers
    look(servers, clock)
    one.let_go()
    assert not one()
    assert look([two, one], clock) == [True, False]


def test_one_that_is_cut_off_stops_before_another_begins(servers: list[Leader], clock: Clock) -> None:
    one, two = servers
    look(servers, clock)
    leading = []
    for _ in range(int(LEASE_S / RENEW_S) + 2):
        look([two], clock)
        leading.append((one(), two()))
    assert (True, True) not in leading
    assert leading[0] == (True, False)
    assert leading[-1] == (False, True)
    assert (False, False) in leading, f"after {LEADS_S} s the first one does not trust its lease"
    assert look([two, one], clock) == [True, False], "it is back, and finds another's"


def test_of_two_that_begin_at_once_one_was_faster(servers: list[Leader], clock: Clock, cluster: Cluster) -> None:  # noqa: F811
    one, two = servers
    both_saw = KubeApi().get(LEASE)
    two.look()
    with pytest.raises(ApiError, match="has been modified") as refused:
        one._write(both_saw, "pod-0")
    assert refused.value.status == 409
    assert look([one, two], clock) == [False, True]
