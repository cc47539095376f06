"""The node agent (functions/server/agent.py) by itself: its protocol, spoken by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from functions.base.wire import Call, Json
from tests.support.forked import ForkedAgent
from tests.support.processes import descendants, exists
from tests.support.waiting import until

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"

START = """
import os, socket, sys, time
from pathlib import Path
from functions.server.agent import NodeAgent
from functions.server.forked import Start
from functions.server.lines import Lines

fork = os.fork

def fork_and_die():
    parent = os.getpid()
    if fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.01)
    return 0

os.fork = fork_and_die
settings = {"kind": "reward", "exchange": sys.argv[1] + "/exchange", "job": "job", "name": "orphan"}
agent = NodeAgent(Path(sys.argv[1]), parked_bytes=0)
agent.start(Lines(socket.socketpair()[0]), Start(settings, sys.argv[1] + "/log"))
"""


def test_a_replica_whose_agent_dies_right_after_the_fork_goes_too(tmp_path: Path) -> None:
    """The kernel tells of a parent's death only if asked before it: who asks too late has to look."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "is gone" in done.stderr
    assert not (tmp_path / "log").exists(), "it never served"


class Agent:
    """An agent, and its client's side."""

    def __init__(self, root: Path, parked_gb: float) -> None:
        self.root, (ours, theirs) = root, socket.socketpair()
        (root / "agent").mkdir()
        self.listener = f"{root}/agent/agent.sock"
        options = ["--parked-gb", str(parked_gb), "--scratch", f"{root}/agent", "--listen", self.listener]
        self.process = ForkedAgent(["--parent", str(os.getpid()), *options], theirs)
        theirs.close()
        self.socket, self.lines = ours, ours.makefile("r")
        assert "ready" in self.hear()

    def hear(self) -> Json:
        value: Json = json.loads(self.lines.readline())
        return value

    def tell(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def start(self, name: str, **settings: Any) -> Json:
        """What it answers, once the process has said that it holds something."""
        told = {"kind": f"{FUNCTIONS}:Parks", "exchange": str(self.root / "exchange"), "job": "job", "name": name}
        self.tell(start={"settings": told | settings, "log": str(self.root / f"{name}.log")})
        started: Json = self.hear()["started"]
        assert started["name"] == name
        return started

    def call(self, started: Json, operation: str, token: str = "", **params: Any) -> Json:
        """The last event."""
        body = Call(f"{started['name']}.{operation}", operation, params=params).to_json()
        with httpx.Client(transport=httpx.HTTPTransport(uds=started["socket"]), timeout=60) as client:
            answer = client.post("http://r/v1/call", json=body, headers={"authorization": f"Bearer {token or chr(45)}"})
        if answer.status_code != 200:
            return {"status": answer.status_code}
        value: Json = json.loads(answer.text.splitlines()[-1])["data"]
        return value

    def park(self, started: Json) -> Json:
        self.tell(park=started["name"])
        gone: Json = self.hear()["gone"]
        return gone

    def alive(self) -> list[int]:
        return descendants(self.process.pid)


@pytest.fixture
def agent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agent]:
    made = Agent(tmp_path, getattr(request, "param", 4.0))
    yield made
    there = made.alive()
    made.lines.close()
    made.socket.close()
    code = made.process.wait(30)
    until(lambda: not any(map(exists, there)))
    assert code == -signal.SIGKILL or [path.name for path in (tmp_path / "agent").iterdir()] == ["agent.sock"]


def test_a_process_parks_and_the_next_start_of_its_function_gets_it(agent: Agent) -> None:
    first = agent.start("a-0")
    assert agent.call(first, "hold", version=3)["name"] == "a-0"
    assert agent.park(first) == {"name": "a-0", "code": 0, "parked": True}
    assert agent.call(first, "held") == {"status": 503}, "it is nobody's"
    second = agent.start("a-1")
    assert (second["pid"], second["socket"], second["parked"]) == (first["pid"], first["socket"], True)
    assert agent.call(second, "held") == {"version": 3, "name": "a-1", "parks": 1, "pid": first["pid"]}
    assert "unparked after" in (agent.root / "a-1.log").read_text()
    third = agent.start("a-2")
    assert not third["parked"]
    assert third["pid"] != first["pid"]


def test_the_newest_version_of_the_same_job_function_and_token_is_handed_out(agent: Agent) -> None:
    processes = [agent.start(f"a-{version}", token="ours") for version in (5, 7, 6)]
    for started, version in zip(processes, (5, 7, 6), strict=True):
        agent.call(started, "hold", "ours", version=version)
        agent.park(started)
    for name, other in (("b-0", {"token": "theirs"}), ("b-1", {"job": "theirs"}), ("b-2", {"options": {"size": 2}})):
        assert not agent.start(name, **({"token": "ours"} | other))["parked"], "none of ours"
    found = [agent.call(agent.start(f"c-{n}", token="ours"), "held", "ours")["version"] for n in range(3)]
    assert found == [7, 6, 5]


@pytest.mark.parametrize("when", ["parked", "as it wakes", "as it parks"])
def test_a_process_that_is_killed_is_replaced_by_a_new_one(agent: Agent, when: str) -> None:
    first = agent.start("a-0")
    agent.call(first, "hold", version=3)
    if when == "as it parks":
        agent.call(first, "dies_parking")
        assert agent.park(first) == {"name": "a-0", "code": -signal.SIGKILL, "parked": False}
    else:
        agent.park(first)
        os.kill(first["pid"], signal.SIGSTOP if when == "as it wakes" else signal.SIGKILL)
        if when == "as it wakes":
            agent.tell(start={"settings": first_settings(agent, "a-1"), "log": str(agent.root / "a-1.log")})
            os.kill(first["pid"], signal.SIGKILL)
            second = agent.hear()["started"]
            assert not second["parked"]
            assert agent.call(second, "held")["version"] is None
            return
        until(lambda: not exists(first["pid"]))
    second = agent.start("a-1")
    assert agent.call(second, "held") == {"version": None, "name": "a-1", "parks": 0, "pid": second["pid"]}


def first_settings(agent: Agent, name: str) -> Json:
    return {"kind": f"{FUNCTIONS}:Parks", "exchange": str(agent.root / "exchange"), "job": "job", "name": name}


def test_two_starts_never_get_one_process(agent: Agent) -> None:
    first = agent.start("a-0")
    agent.call(first, "hold", version=1)
    agent.tell(park="a-0")
    for name in ("a-1", "a-2"):
        agent.tell(start={"settings": first_settings(agent, name), "log": str(agent.root / "log")})
    heard = [agent.hear() for _ in range(3)]
    started = {m["started"]["name"]: m["started"]["pid"] for m in heard if "started" in m}
    assert sorted(started) == ["a-1", "a-2"]
    assert len(set(started.values())) == 2
    assert first["pid"] in started.values(), "one waited until it had parked"


def test_what_cannot_come_back_ends_and_says_why(agent: Agent) -> None:
    first = agent.start("a-0")
    agent.call(first, "dies_waking")
    agent.park(first)
    second = agent.start("a-1")
    if second["pid"] == first["pid"]:  # awake, and then it ended; else its end came first, and it was replaced at once
        assert agent.hear() == {"gone": {"name": "a-1", "code": 71, "parked": False}}
        second = agent.start("a-2")
    assert "the canary differs" in (agent.root / "a-1.log").read_text()
    assert agent.call(second, "held")["version"] is None, "from nothing"


@pytest.mark.parametrize("agent", [0.05], indirect=True)
def test_a_full_budget_ends_those_that_were_used_longest_ago(agent: Agent) -> None:
    started = [agent.start(f"a-{n}") for n in range(3)]
    for process in started:
        agent.call(process, "hold", version=1, mb=16)
    for process in started:
        agent.park(process)
    until(lambda: not exists(started[0]["pid"]))
    assert exists(started[2]["pid"])
    agent.call(large := agent.start("a-3"), "hold", version=1, mb=64)
    agent.park(large)
    until(lambda: not exists(large["pid"]))


@pytest.mark.parametrize("agent", [0.0], indirect=True)
def test_without_a_budget_nothing_parks(agent: Agent) -> None:
    first = agent.start("a-0")
    assert agent.park(first)["parked"] is False
    assert not exists(first["pid"])


@pytest.mark.parametrize("agent", [0.0], indirect=True)
def test_many_that_end_at_once(agent: Agent) -> None:
    """A process's end is heard twice, as a signal and at its socket, in either order and among others' ends."""
    started = [agent.start(f"a-{n}") for n in range(16)]
    for process in started:
        agent.tell(kill=process["name"])
    assert {agent.hear()["gone"]["name"] for _ in started} == {process["name"] for process in started}
    assert agent.start("b-0")["parked"] is False


def test_what_users_code_has_started_does_not_outlive_its_replica(agent: Agent) -> None:
    first = agent.start("a-0")
    child = agent.call(first, "spawn")["child"]
    assert exists(child)
    assert agent.park(first)["parked"] is False
    assert not exists(child)


def test_a_function_that_cannot_park_is_ended(agent: Agent) -> None:
    first = agent.start("a-0", kind=f"{FUNCTIONS}:Fails")
    assert agent.park(first)["parked"] is False
    assert not exists(first["pid"])


@pytest.mark.parametrize("state", ["working", "parked", "waking"])
def test_an_agent_that_is_killed_takes_all_along_in_any_state(agent: Agent, state: str) -> None:
    first = agent.start("a-0")
    agent.call(first, "hold", version=1)
    if state != "working":
        agent.park(first)
    if state == "waking":
        os.kill(first["pid"], signal.SIGSTOP)
        agent.tell(start={"settings": first_settings(agent, "a-1"), "log": str(agent.root / "log")})
    there = agent.alive()
    assert len(there) == 2, "a keeper and a replica"
    agent.process.kill()
    until(lambda: not any(map(exists, there)))
