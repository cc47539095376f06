"""A pod's ticket (functions/server/ticket.py) and the agent of its node: real processes, a real socket for each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from functions.base.wire import ALIVE, Call, Json
from functions.exchange.directory import DirectoryExchange
from tests.exchange.servers import free_port
from tests.support.forked import ForkedAgent
from tests.support.processes import descendants, exists
from tests.support.waiting import until

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"


class Pod:
    """A ticket, as the container's process that Knative calls."""

    def __init__(self, root: Path, name: str, token: str = "ours", kind: str = "Parks", devices: str = "") -> None:
        self.port, self.token, self.name = free_port(), token, name
        self.log = root / f"{name}.log"
        env = {
            "RLHF_KIND": f"{FUNCTIONS}:{kind}", "RLHF_EXCHANGE": str(root / "exchange"), "RLHF_JOB": "job",
            "RLHF_NAME": name, "RLHF_TOKEN": token, "RLHF_AGENT": str(root / "agent.sock"), "PORT": str(self.port),
            "SECRET": "of the job", "NVIDIA_VISIBLE_DEVICES": devices,
        }  # fmt: skip
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "functions.server"]
            self.process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log)

    def up(self) -> Pod:
        until(lambda: self.ready() or self.process.poll() is not None, within_s=60)
        return self

    def ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/healthz/ready").status_code == 200
        except httpx.TransportError:
            return False

    def request(self, operation: str, **params: object) -> httpx.Request:
        body = Call(f"{self.name}.{operation}", operation, params=params).to_json()
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.Request("POST", f"http://127.0.0.1:{self.port}/v1/call", json=body, headers=headers)

    def call(self, operation: str, **params: object) -> Json:
        with httpx.Client(timeout=60) as client:
            answer = client.send(self.request(operation, **params))
        value: Json = json.loads(answer.text.splitlines()[-1])["data"]
        return value

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[ForkedAgent]:
    with running_agent(tmp_path) as process:
        yield process


@contextmanager
def running_agent(root: Path) -> Iterator[ForkedAgent]:
    listener = root / "agent.sock"
    port = free_port()
    process = ForkedAgent(["--scratch", str(root), "--parked-gb", "4", "--listen", str(listener), "--port", str(port)])
    process.port = port  # type: ignore[attr-defined]
    until(lambda: listener.exists() and said(port, "healthz/live") == "ok\n", within_s=60)
    try:
        yield process
    finally:
        there = descendants(process.pid)
        process.terminate()
        process.wait(60)
        until(lambda: not any(map(exists, there)))


def said(port: int, path: str) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/{path}").text
    except httpx.TransportError:
        return ""


def test_a_ticket_gets_a_process_gives_it_back_and_the_next_gets_it_parked(agent: ForkedAgent, tmp_path: Path) -> None:
    DirectoryExchange(tmp_path / "exchange" / "job").put(ALIVE, b"")
    first = Pod(tmp_path, "pod-1").up()
    held = first.call("hold", version=3)
    assert held["pid"] in descendants(agent.pid)
    assert held["secret"] == "of the job"
    assert first.end() == 0
    other = Pod(tmp_path, "pod-2", token="theirs").up()
    assert other.call("held")["version"] is None, "a ticket of another job"
    second = Pod(tmp_path, "pod-3").up()
    assert second.call("held") == held | {"name": "pod-3", "parks": 1}
    assert "was parked" in second.log.read_text()
    lines = said(agent.port, "metrics").splitlines()  # type: ignore[attr-defined]
    assert {"rlhf_agent_hits_total 1.0", "rlhf_agent_misses_total 2.0"} <= set(lines)
    assert second.end() == other.end() == 0


def test_a_pod_that_is_killed_in_mid_call_takes_its_process_along(agent: ForkedAgent, tmp_path: Path) -> None:
    pod = Pod(tmp_path, "pod-1", kind="Count").up()
    with httpx.Client(timeout=60) as client:
        answer = client.send(pod.request("count", n=2, hold=1), stream=True)
        assert answer.status_code == 200
        [_, replica] = descendants(agent.pid)
        pod.process.kill()
        pod.process.wait()
        until(lambda: not exists(replica))
        answer.close()
    other = Pod(tmp_path, "pod-2").up()
    assert other.call("held")["pid"] in descendants(agent.pid), "the agent goes on"
    assert other.end() == 0


def test_a_pod_killed_while_its_process_parks_leaves_it_parked_and_who_wants_its_device_waits(
    agent: ForkedAgent, tmp_path: Path
) -> None:
    """A pod's grace is a second (Knative's platform), and leaving an accelerator takes as long as it takes."""
    DirectoryExchange(tmp_path / "exchange" / "job").put(ALIVE, b"")
    pod = Pod(tmp_path, "pod-1", devices="gpu-1").up()
    held = pod.call("hold", version=3, until=str(tmp_path / "go"))
    pod.process.terminate()
    until(lambda: '{state="parking"} 1.0' in said(agent.port, "metrics"))  # type: ignore[attr-defined]
    pod.process.kill()
    pod.process.wait()
    other = Pod(tmp_path, "pod-2", token="theirs", devices="gpu-0,gpu-1")
    third = Pod(tmp_path, "pod-3", token="theirs", devices="gpu-2").up()
    assert third.call("held")["version"] is None
    assert not other.ready(), "the device is not free yet"
    (tmp_path / "go").touch()
    assert other.up().call("held")["pid"] != held["pid"]
    again = Pod(tmp_path, "pod-4", devices="gpu-1").up()
    assert again.call("held")["pid"] == held["pid"]
    for one in (other, third, again):
        assert one.end() == 0


def test_a_pod_ends_with_its_process_and_with_its_agent(agent: ForkedAgent, tmp_path: Path) -> None:
    pod = Pod(tmp_path, "pod-1").up()
    os.kill(pod.call("held")["pid"], signal.SIGKILL)
    assert pod.process.wait(60) == 128 + signal.SIGKILL
    pod = Pod(tmp_path, "pod-2").up()
    agent.kill()
    assert pod.process.wait(60) == 1


def test_without_an_agent_the_function_runs_in_the_pod(tmp_path: Path) -> None:
    pod = Pod(tmp_path, "pod-1").up()
    assert pod.call("held")["pid"] == pod.process.pid
    assert "no process of the node's agent" in pod.log.read_text()
    assert pod.end() == 0


def test_parked_processes_end_when_their_job_has_no_orchestrator(agent: ForkedAgent, tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange" / "job")
    exchange.put(ALIVE, b"")
    pod = Pod(tmp_path, "pod-1").up()
    pid = pod.call("hold", version=1)["pid"]
    pod.end()
    assert exists(pid)
    exchange.delete(ALIVE)
    until(lambda: not exists(pid), within_s=60)
