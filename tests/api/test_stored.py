"""Servers and orchestrators that have nothing in common but a store: each on a disk of its own, as pods are."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from functions.exchange.open import open_exchange
from orchestrator.api.app import create_app
from orchestrator.api.auth import Tokens
from orchestrator.api.jobs import Jobs
from orchestrator.api.kept import StoredRuns
from orchestrator.api.launch import Alone
from orchestrator.api.routes import Site
from orchestrator.base.errors import Away
from orchestrator.job.config import parse_job
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import EventLog
from orchestrator.run.mirror import RUNNER
from orchestrator.run.stored import FILES, bring, open_runs, run_mirror
from tests.api.conftest import JOB, WRITE, wait_for
from tests.support.tiny_job import ENV, arguments, assert_same, command, here, make_job, metrics, model

STEPS = 4


class Pods:
    """A launcher whose orchestrators begin in empty directories and have no other way to anybody than the store."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url, self.place = path, url, f"{url}#here"
        self.pods: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}

    def start(self, job: str, launch: int) -> None:
        directory = self.path / f"{job}-{launch}" / "runs" / job
        words = arguments("resume", directory, "--keep-output", f"--store={self.place}")
        self.pods[job] = directory, subprocess.Popen(words, env=ENV, stdout=subprocess.DEVNULL)

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


def server(tmp_path: Path, pods: Pods | Threads, name: str, leads: Alone | None = None, max_running: int = 1) -> Jobs:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ci write {WRITE}\n")
    runs = tmp_path / name
    kept = StoredRuns(runs, open_runs(pods.place))
    return Jobs(runs, pods, max_running=max_running, quota=Tokens(tokens).quota, kept=kept, leads=leads)


@contextmanager
def answering(
    tmp_path: Path, pods: Pods | Threads, name: str, root: Path, leads: Alone | None = None
) -> Iterator[TestClient]:
    jobs = server(tmp_path, pods, name, leads)
    defaults = {"exchange": {"url": pods.url}}
    app = create_app(jobs, Site([root, jobs.runs / FILES], defaults), Tokens(tmp_path / "tokens"), loopback=False)
    with TestClient(app, headers={"Authorization": f"Bearer {WRITE}"}) as client:
        wait_for(lambda: client.get("/readyz").status_code == 200, what="ready")
        yield client


VIEWS = ["", "/metrics", "/cost", "/cost/steps", "/samples", "/samples?step=1", "/event-log", "/plan", "/replicas",
         "/checkpoints", "/health", "/where", "/output"]  # fmt: skip


def views(client: TestClient, id: str) -> dict[str, Any]:
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
    committed = str(tmp_path / "store" / "*" / "journal" / "000002*")
    wait = f"""    import glob, os, time
    while os.path.exists({str(held)!r}) and glob.glob({committed!r}): time.sleep(0.01)
    return"""
    reward.write_text(reward.read_text().replace("    return", wait, 1))
    held.touch()
    pods = Pods(tmp_path / "pods", f"dir://{tmp_path}/store")
    body, headers = job.file.read_text(), {"Content-Type": "application/toml", "Idempotency-Key": "one"}

    def at(client: TestClient, step: int) -> Callable[[], bool]:
        return lambda: (client.get(f"/v1/jobs/{id}").json()["step"] or 0) >= step

    with answering(tmp_path, pods, "first", job.directory) as first:
        made = first.post("/v1/jobs", content=body, headers=headers)
        assert made.status_code == 201, made.text
        id = made.json()["id"]
        wait_for(at(first, 2), what="a step")
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
        assert_same(run, tmp_path / "undisturbed")
        words = ["fetch", id, "--store", pods.place, "--runs", tmp_path / "desk"]
        assert here(*words).stdout == f"{tmp_path / 'desk' / id}\n"
        assert model(tmp_path / "desk" / id) == model(run)
        assert metrics(tmp_path / "desk" / id) == metrics(run)
        assert "is there already" in here(*words).stderr
        assert second.delete(f"/v1/jobs/{id}").status_code == 204
    assert open_runs(pods.place).list(f"run/{id}/") == []
    assert open_exchange(pods.url, id).list("") == []


class Threads:
    """A launcher whose orchestrators have a directory and a mirror each, and write one event when they are told to."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url, self.place = path, url, f"{url}#here"
        self.starts: list[str] = []
        self.at_work: set[str] = set()

    def start(self, job: str, launch: int) -> None:
        if f"{job}-{launch}" not in self.starts:  # as a cluster refuses a second Job of that name
            self.starts.append(f"{job}-{launch}")
            self.at_work.add(job)
            self._write(job, "started", {"execution": launch, "step": -1, "steps": 3})

    def stop(self, job: str) -> None:
        if job in self.at_work:
            self.end(job, "cancelled")

    def end(self, job: str, kind: Any = "finished") -> None:
        self._write(job, kind, {"message": "", "model": "model"})
        self.at_work.discard(job)

    def _write(self, job: str, kind: Any, data: dict[str, Any]) -> None:
        directory = self.path / f"{len(self.starts)}" / job
        mirror = run_mirror(open_runs(self.place), directory, by=f"{RUNNER}{time.monotonic_ns()}")
        mirror.push(begins=True)
        assert RunDirectory.open(directory).job.name == job
        log = EventLog(directory)
        log.append(kind, data)
        log.close()
        mirror.push(whole=True)

    def alive(self, jobs: Iterable[str]) -> frozenset[str]:
        return frozenset(self.at_work) & frozenset(jobs)

    def keep(self) -> None:
        pass


@pytest.fixture
def pods(tmp_path: Path) -> Threads:
    return Threads(tmp_path / "pods", f"dir://{tmp_path}/store")


def submitted(jobs: Jobs, root: Path, url: str, key: str | None = None) -> tuple[str, bool]:
    job, new = jobs.submit(parse_job(JOB | {"exchange": {"url": url}}, base=root), key=key, body=b"", owner="ci")
    return job.id, new


def test_servers_know_what_the_others_were_told(tmp_path: Path, root: Path, pods: Threads) -> None:
    one, two = server(tmp_path, pods, "one"), server(tmp_path, pods, "two", Standby())
    first, _ = submitted(one, root, pods.url)
    assert two.get(first).state == "queued"
    assert (two.get(first).desired, two.get(first).config) == (one.get(first).desired, one.get(first).config)
    second, _ = submitted(two, root, pods.url)
    two.tick()
    assert pods.starts == [], "it does not lead"
    for jobs in (one, two):
        jobs.tick()
        jobs.tick()
    assert pods.starts == [f"{first}-1"], "one at a time"
    assert [(two.get(id).state, one.get(id).state) for id in (first, second)] == [("running",) * 2, ("queued",) * 2]
    pods.end(first)
    one.tick()
    two.tick()
    assert pods.starts == [f"{first}-1", f"{second}-1"]
    assert two.get(first).state == one.get(first).state == "succeeded"
    assert two.get(first).settled
    two.cancel(second)
    one.tick()
    two.tick()
    assert two.get(second).state == "cancelled"
    two.resume(second)
    one.tick()
    assert pods.starts[-1] == f"{second}-2"
    one.cancel(second)
    one.tick()
    one.tick()
    two.delete(second)
    two.delete(first)
    one.tick()
    assert one.all() == two.all() == []
    left = open_runs(pods.place).list("")
    assert [key for key in left if not key.startswith("api/")] == []
    assert [path.name for path in (tmp_path / "one").iterdir() if not path.name.startswith(".")] == []


def test_a_job_that_is_being_launched_runs(tmp_path: Path, root: Path) -> None:
    """And is not "interrupted" to who asks in that moment."""
    seen: list[str] = []

    class Looks(Threads):
        def start(self, job: str, launch: int) -> None:
            with ThreadPoolExecutor(1) as pool:  # as another request does
                seen.append(pool.submit(jobs.get, job).result(60).state)
            super().start(job, launch)

    pods = Looks(tmp_path / "pods", f"dir://{tmp_path}/store")
    jobs = server(tmp_path, pods, "one")
    submitted(jobs, root, pods.url)
    jobs.tick()
    assert seen == ["running"]


def test_releases_in_one_store_do_not_see_each_other(tmp_path: Path, root: Path, pods: Threads) -> None:
    one = server(tmp_path, pods, "one")
    id, _ = submitted(one, root, pods.url)
    pods.place = f"{pods.url}#there"
    two = server(tmp_path, pods, "two")
    two.tick()
    assert (two.all(), pods.starts) == ([], [])
    assert [job.id for job in one.all()] == [id]


def test_a_job_that_waits_is_cancelled_by_a_server_that_does_not_lead(
    tmp_path: Path, root: Path, pods: Threads
) -> None:
    one, two = server(tmp_path, pods, "one", max_running=0), server(tmp_path, pods, "two", Standby())
    id, _ = submitted(one, root, pods.url)
    two.cancel(id)
    one.tick()
    two.tick()
    assert (one.get(id).state, two.get(id).state) == ("cancelled", "cancelled")
    assert one.get(id).settled


def test_a_key_makes_one_job_whoever_is_asked(tmp_path: Path, root: Path, pods: Threads) -> None:
    """All at once: of those that found no job, one was first, and the others look again."""
    servers = [server(tmp_path, pods, f"s{number}") for number in range(4)]
    for round in range(5):
        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(submitted, jobs, root, pods.url, f"key-{round}") for jobs in servers]
        found = [one.result() for one in made]
        assert len({id for id, _ in found}) == 1
        assert sorted(new for _, new in found) == [False, False, False, True]
    for jobs in servers:
        jobs.kept.refresh()
        assert len(jobs.all()) == 5


def test_a_deletion_that_was_killed_is_ended_by_another_server(tmp_path: Path, root: Path, pods: Threads) -> None:
    one = server(tmp_path, pods, "one")
    id, _ = submitted(one, root, pods.url)
    one.tick()
    pods.end(id)
    one.tick()
    one.kept.rename(id, f".deleted-{id}-00000000")  # and so far it came
    shutil.rmtree(tmp_path / "one")
    two = server(tmp_path, pods, "two")
    two.tick()
    two.sweep()
    assert two.all() == []
    assert not list((tmp_path / "two").glob(".deleted-*"))
    assert open_runs(pods.place).list("run/") == []


def test_a_store_that_is_away_for_a_while(tmp_path: Path, root: Path, pods: Threads) -> None:
    """What is known is told; what is asked for is refused, or done, and nothing is taken for killed."""
    with answering(tmp_path, pods, "one", root) as api:
        body = JOB | {"exchange": {"url": pods.url}}
        id = api.post("/v1/jobs", json=body).json()["id"]
        wait_for(lambda: api.get(f"/v1/jobs/{id}").json()["state"] == "running", what="running")
        pods.end(id)
        (tmp_path / "store").rename(tmp_path / "away")
        for _ in range(3):
            assert api.get(f"/v1/jobs/{id}").json()["id"] == id
            answer = api.post("/v1/jobs", json=body)
            assert (answer.status_code, "runs: " in answer.json()["detail"]) == (503, True)
            time.sleep(0.5)
        (tmp_path / "away").rename(tmp_path / "store")
        wait_for(
            lambda: api.get(f"/v1/jobs/{id}").json()["state"] == "succeeded", what="the end that was told meanwhile"
        )
        assert pods.starts == [f"{id}-1"]
        assert api.post("/v1/jobs", json=body).status_code == 201


def test_a_log_that_a_job_has_spoiled_is_its_own_affair(tmp_path: Path, root: Path, pods: Threads) -> None:
    one = server(tmp_path, pods, "one", max_running=2)
    bad, good = (submitted(one, root, pods.url)[0] for _ in range(2))
    one.tick()
    number = one.kept._run(bad).number + 1  # type: ignore[attr-defined]
    open_runs(pods.place).put(f"run/{bad}/log/0/{number:08d}", b"[" * 100_000 + b"\n")
    open_runs(pods.place).put(f"run/{bad}/log/end/zzzzzzzz", b"")
    pods.end(good)
    one.tick()
    assert (one.get(bad).state, one.get(good).state) == ("running", "succeeded")


def test_a_server_waits_for_the_store_before_it_is_ready(tmp_path: Path, root: Path, pods: Threads) -> None:
    jobs = server(tmp_path, pods, "one")
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(Away):
        jobs.tick()
    assert not jobs.ready.is_set()
    (tmp_path / "away").rename(tmp_path / "store")
    jobs.tick()
    assert jobs.ready.is_set()


def test_a_bundle_reaches_every_server_and_the_orchestrator(tmp_path: Path, root: Path, pods: Threads) -> None:
    """All of them have it under the same path, as their pods do: here one after the other."""
    runs, bundle = tmp_path / "runs", "0123456789abcdef"
    data = bytes(range(256)) * 80_000

    def put(api: TestClient, path: str, content: bytes) -> int:
        return api.put(f"/v1/files/{bundle}", params={"path": path}, content=content).status_code

    with answering(tmp_path, pods, "runs", root) as api:
        assert put(api, "model/a.bin", data) == 201
        assert put(api, "data-train/train.jsonl", b"{}") == 201
    shutil.rmtree(runs)
    with answering(tmp_path, pods, "runs", root) as api:
        assert put(api, "model/a.bin", data) == 201
        assert put(api, "model/a.bin", b"another") == 409
        assert put(api, "model/b.bin", b"b") == 201
        body = JOB | {"model": {"path": f"{runs / FILES / bundle}/model"}, "exchange": {"url": pods.url}}
        id = api.post("/v1/jobs", json=body).json()["id"]
        wait_for(lambda: pods.starts, what="started")
    shutil.rmtree(runs)
    _, job = bring(runs / id, open_runs(pods.place))
    assert job.name == id
    found = {path.name: path.read_bytes() for path in (runs / FILES / bundle).rglob("*") if path.is_file()}
    assert found == {"a.bin": data, "b.bin": b"b", "train.jsonl": b"{}"}
