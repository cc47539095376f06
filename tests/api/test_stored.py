"""Servers and orchestrators that have nothing in common but a store: each on a disk of its own, as pods are."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from functions.exchange.open import open_exchange
from functions.exchange.scoped import RUNS
from orchestrator.api.app import create_app
from orchestrator.api.auth import Tokens
from orchestrator.api.jobs import Jobs
from orchestrator.api.kept import StoredRuns
from orchestrator.api.launch import Alone
from orchestrator.api.routes import Site
from orchestrator.base.errors import RunError
from orchestrator.commands.main import main
from orchestrator.job.config import parse_job
from orchestrator.run.mirror import Mirror
from orchestrator.run.stored import FILES, open_runs, take_stored
from tests.api.conftest import JOB, WRITE, wait_for
from tests.exchange.conftest import fresh_redis  # noqa: F401  # a fixture
from tests.exchange.servers import RedisServer
from tests.support.forked import ForkedCommand
from tests.support.tiny_job import ENV, assert_same, command, make_job

STEPS = 4


class Pods:
    """A launcher whose orchestrators begin in empty directories and have no other way to anybody than the store."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        self.pods: dict[str, tuple[Path, ForkedCommand]] = {}

    def start(self, job: str, launch: int) -> None:
        directory = self.path / f"{job}-{launch}" / "runs" / job
        words = ["resume", str(directory), "--keep-output", f"--store={self.url}"]
        self.pods[job] = directory, ForkedCommand(main, words, ENV)

    def stop(self, job: str) -> None:
        self.pods[job][1].terminate()

    def lose(self, job: str) -> None:
        """The node is gone, with its disk."""
        directory, process = self.pods[job]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        shutil.rmtree(directory.parents[1])

    def alive(self, jobs: Iterable[str]) -> frozenset[str]:
        return frozenset(job for job in jobs if job in self.pods and self.pods[job][1].poll() is None)

    def keep(self) -> None:
        pass


class Standby(Alone):
    """Leads when it is told to."""

    leading = False

    def __call__(self) -> bool:
        return self.leading


def server(tmp_path: Path, pods: Pods, name: str, leads: Alone | None = None, max_running: int = 1) -> Jobs:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ci write {WRITE}\n")
    runs = tmp_path / name
    kept = StoredRuns(runs, open_runs(pods.url))
    return Jobs(runs, pods, max_running=max_running, quota=Tokens(tokens).quota, kept=kept, leads=leads)


@contextmanager
def answering(tmp_path: Path, pods: Pods, name: str, root: Path, leads: Alone | None = None) -> Iterator[TestClient]:
    jobs = server(tmp_path, pods, name, leads)
    defaults = {"exchange": {"url": pods.url}}
    app = create_app(jobs, Site([root, jobs.runs / FILES], defaults), Tokens(tmp_path / "tokens"), loopback=False)
    with TestClient(app, headers={"Authorization": f"Bearer {WRITE}"}) as client:
        wait_for(lambda: client.get("/readyz").status_code == 200, what="ready")
        yield client


VIEWS = ["", "/metrics", "/cost", "/cost/steps", "/samples", "/samples?step=1", "/event-log", "/plan", "/replicas",
         "/checkpoints", "/health", "/where", "/output"]  # fmt: skip


def views(client: httpx.Client, id: str) -> dict[str, Any]:
    found = {view: client.get(f"/v1/jobs/{id}{view}") for view in VIEWS}
    assert {view: answer.status_code for view, answer in found.items()} == dict.fromkeys(VIEWS, 200)
    told = {view: answer.json() for view, answer in found.items()}
    del told["/checkpoints"]["run"]  # where this server has it
    return told


@pytest.mark.timeout(300)
def test_what_is_lost_with_a_node_is_in_the_store(tmp_path: Path) -> None:
    """The server is lost in the middle, with its disk; the orchestrator is, with its own: the job ends as one that
    nothing happened to, and the second server tells all that the first one told."""
    job = make_job(tmp_path / "data", steps=STEPS)
    held = tmp_path / "held"
    reward = tmp_path / "data" / "reward.py"
    assert command("run", job.file, "--run-dir", tmp_path / "undisturbed").returncode == 0
    wait = f"    import os, time\n    while os.path.exists({str(held)!r}): time.sleep(0.01)\n    return"
    reward.write_text(reward.read_text().replace("    return", wait, 1))
    pods = Pods(tmp_path / "pods", f"dir://{tmp_path}/store")
    body, headers = job.file.read_text(), {"Content-Type": "application/toml", "Idempotency-Key": "one"}

    def at(client: httpx.Client, step: int) -> Callable[[], bool]:
        return lambda: (client.get(f"/v1/jobs/{id}").json()["step"] or 0) >= step

    with answering(tmp_path, pods, "first", job.directory) as first:
        made = first.post("/v1/jobs", content=body, headers=headers)
        assert made.status_code == 201, made.text
        id = made.json()["id"]
        wait_for(at(first, 1), what="a step")
        held.touch()
    shutil.rmtree(tmp_path / "first")
    with answering(tmp_path, pods, "second", job.directory) as second:
        assert second.get(f"/v1/jobs/{id}").json()["state"] == "running"
        assert second.post("/v1/jobs", content=body, headers=headers).json()["id"] == id, "the key is known"
        pods.lose(id)
        held.unlink()
        wait_for(lambda: second.get(f"/v1/jobs/{id}").json()["state"] == "succeeded", what="the end")
        with answering(tmp_path, pods, "third", job.directory, Standby()) as third:
            told = views(second, id)
            assert views(third, id) == told
            assert [found["id"] for found in third.get("/v1/jobs").json()["jobs"]] == [id]
        run = pods.pods[id][0]
        assert told[""]["executions"] == 2
        assert told["/metrics"]["steps"] == list(range(STEPS + 1))
        assert (told["/samples"]["total"], told["/checkpoints"]["model"]) == (12, True)
        steps = [event["data"]["step"] for event in told["/event-log"]["events"] if event["type"] == "step"]
        assert steps == list(range(STEPS, -1, -1))
        assert any("goes on from step" in line for line in told["/output"]["lines"])
        (run / "journal").exists()
        assert_same(run, tmp_path / "undisturbed")
        assert second.delete(f"/v1/jobs/{id}").status_code == 204
    assert open_exchange(pods.url, RUNS).list(f"run/{id}/") == []
    assert open_exchange(pods.url, id).list("") == []
