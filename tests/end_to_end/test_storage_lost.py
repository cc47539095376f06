"""Whole jobs that lose their storage: they wait, make again what is gone, and end by themselves with the history,
metrics and weights of an undisturbed run. Where it lasts for too long: one clear line, an exit code that is not 0, and
`resume` does the same."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
from redis import Redis

from functions.base.wire import Json
from functions.server.forkserver_client import FORKSERVER
from functions.server.settings import listen_unix
from orchestrator.commands.main import main
from tests.exchange.servers import LosesAnswers, Meanwhile, MotoServer, RedisServer
from tests.support.forked import ForkedCommand, fork_agents, run_command
from tests.support.tiny_job import ENV, STEPS, Background, Job, assert_same, command, history, metrics

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LosesAnswers]:
    """An S3 server behind what takes it away and gives it back."""
    (tmp_path / "s3").mkdir()
    server = MotoServer(tmp_path / "s3")
    for name, value in server.environment.items():
        monkeypatch.setitem(ENV, name, value)
    try:
        server.start().make_bucket("bucket")
        relay = LosesAnswers(server.port, always=True)
        yield relay
        relay.stop()
    finally:
        server.stop()


@pytest.fixture
def exchange(s3: LosesAnswers, redis: RedisServer) -> str:
    return f"tiered+s3://bucket/jobs?endpoint=http://127.0.0.1:{s3.port}&redis={redis.url}"


class Emptied(Meanwhile):
    """Before `redis`: empties it before the first request with `word` in it goes through, or any other."""

    def __init__(self, redis: RedisServer, word: bytes) -> None:
        self.lock = threading.Lock()
        super().__init__(redis.port, word, lambda: Redis(port=redis.port).flushall())

    def passes(self, piece: bytes, answers: bool) -> bool:
        with self.lock:
            return super().passes(piece, answers)


def started(job: Job, run: Path, exchange: str, *more: str) -> Background:
    return Background("run", job.file, "--run-dir", run, f"exchange.url={exchange}", *more)


def last_line(running: Background) -> str:
    output, _ = running.process.communicate(timeout=250)
    assert running.process.returncode not in (0, -9), output
    assert "Traceback" not in output
    return output.strip().splitlines()[-1]


def ends_well(running: Background) -> None:
    output, _ = running.process.communicate(timeout=250)
    assert running.process.returncode == 0, output


def told(run: Path, what: str) -> list[str]:
    """The notes of the run's events that begin with `what`."""
    return [note["message"] for note in events(run, "note") if note["message"].startswith(what)]


def events(run: Path, type: str) -> list[Json]:
    """The data of the run's events of one type."""
    try:
        lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["data"] for event in found if event["type"] == type]


def replicas(run: Path) -> int:
    """That exist now."""
    return int(sum(events(run, "stage")[-1]["replicas"].values()))


def test_s3_away_at_the_start_and_in_mid_step(
    job: Job, undisturbed: Path, tmp_path: Path, s3: LosesAnswers, exchange: str
) -> None:
    """The job waits with nothing that costs, says so once, and goes on by itself."""
    run, waiting = tmp_path / "run", f"waiting for s3://bucket/jobs/ at http://127.0.0.1:{s3.port}, "
    s3.armed.set()
    running = started(job, run, exchange)
    running.wait_for(lambda: len(told(run, waiting)) == 1)
    assert not (run / "journal").exists()
    s3.armed_after = b"/calls/s000002.generate."
    s3.armed.clear()
    running.wait_for(s3.armed.is_set)
    running.wait_for(lambda: len(told(run, waiting)) == 2)
    running.wait_for(lambda: replicas(run) == 0)
    assert len(told(run, waiting)) == 2
    s3.armed_after = b""
    s3.armed.clear()
    ends_well(running)
    assert len(told(run, "s3://bucket/jobs/")) >= 2  # is back after so many seconds
    assert_same(run, undisturbed)


def test_an_outage_without_end(job: Job, undisturbed: Path, tmp_path: Path, s3: LosesAnswers, exchange: str) -> None:
    run = tmp_path / "run"
    s3.armed_after = b"/journal/000001"
    line = last_line(started(job, run, exchange, "limits.outage_s=1"))
    assert s3.armed.is_set()
    assert f"127.0.0.1:{s3.port}" in line
    assert "limits.outage_s" in line
    assert "resume" in line
    s3.armed_after = b""
    s3.armed.clear()
    resumed = command("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert_same(run, undisturbed)


def test_a_node_that_alone_held_the_state_of_two_steps(
    job: Job, undisturbed: Path, tmp_path: Path, s3: LosesAnswers
) -> None:
    """The journal has said beforehand where a loss leads to; the steps since then are made again."""
    run = tmp_path / "run"
    running = started(job, run, f"s3://bucket/jobs?endpoint=http://127.0.0.1:{s3.port}", "checkpoints.state_every=5")
    running.wait_for((run / "journal" / "000002.json").exists)
    running.kill()
    records = [json.loads((run / "journal" / f"00000{step}.json").read_text()) for step in range(3)]
    assert [record["pointers"].get("durable") for record in records] == [None, 0, 0]
    resumed = command("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert len([note for note in events(run, "note") if "the job goes back to step 0" in note["message"]]) == 1
    assert "durable" not in json.loads((run / "journal" / "000003.json").read_text())["pointers"]
    assert_same(run, undisturbed)


@pytest.mark.slow
def test_redis_away_in_mid_step(job: Job, undisturbed: Path, tmp_path: Path, redis: RedisServer, exchange: str) -> None:
    """It comes back with nothing in it."""
    run = tmp_path / "run"
    running = started(job, run, exchange)
    running.wait_for(lambda: len(list((run / "journal").glob("*.json"))) >= 2)
    redis.stop()
    running.wait_for(lambda: bool(told(run, "waiting for Redis")))
    redis.start()
    ends_well(running)
    assert_same(run, undisturbed)


@pytest.mark.parametrize("stage", [pytest.param("reward", marks=pytest.mark.slow), "train"])
def test_redis_emptied_in_mid_step(
    job: Job, undisturbed: Path, tmp_path: Path, s3: LosesAnswers, redis: RedisServer, stage: str
) -> None:
    """As a call of step 2 begins that wants what lies there: its own inputs, and those of calls before it."""
    run = tmp_path / "run"
    emptied = Emptied(redis, f"calls/s000002.{stage}.".encode())
    try:
        place = f"redis://127.0.0.1:{emptied.port}/0"
        running = started(job, run, f"tiered+s3://bucket/jobs?endpoint=http://127.0.0.1:{s3.port}&redis={place}")
        ends_well(running)
    finally:
        emptied.stop()
    assert emptied.done.is_set()
    assert len(told(run, "step 2: begun again, as ")) >= 1
    assert_same(run, undisturbed)


GANG = ["functions.train.replicas=2"]
STREAMED = ["planner.policy=adaptive", "planner.objective=speed", "functions.generate.replicas=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "word"), [(GANG, b"calls/s000002.train."), (STREAMED, b"calls/s000002.train.actor")])
def test_redis_emptied_while_a_gang_or_a_streamed_call_trains(
    job: Job, tmp_path: Path, s3: LosesAnswers, redis: RedisServer, how: list[str], word: bytes
) -> None:
    """All steps are made, each on all of its samples."""
    run = tmp_path / "run"
    emptied = Emptied(redis, word)
    try:
        place = f"redis://127.0.0.1:{emptied.port}/0"
        exchange = f"tiered+s3://bucket/jobs?endpoint=http://127.0.0.1:{s3.port}&redis={place}"
        ends_well(started(job, run, exchange, "deterministic=false", *how))
    finally:
        emptied.stop()
    assert emptied.done.is_set()
    assert [record["step"] for record in history(run)] == list(range(STEPS + 1))
    trained = [line["critic/groups"] for line in metrics(run) if "critic/groups" in line]
    assert trained == [3] * STEPS


def fill_up(words: Sequence[str]) -> int:
    """In namespaces of its own, with a forkserver of its own: a run on a small disk that is full from step 1 on, what
    it said and its exit code, and its resume when there is room again."""
    file, disk, kept, told = words
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
        return 90
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(line)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", disk], check=True)
    fork, run = multiprocessing.get_context("fork"), Path(disk, "run")

    def begin(*words: object, to: str) -> ForkProcess:
        files = [f"{told}/{to}{name}" for name in ("out", "err")]
        process = fork.Process(target=run_command, args=(main, [*map(str, words)], dict(os.environ), *files))
        process.start()
        return process

    alive, _end = fork.Pipe(duplex=False)
    os.environ[FORKSERVER] = f"{told}/forkserver"
    with listen_unix(os.environ[FORKSERVER]) as listener:
        fork.Process(target=fork_agents, args=(listener, alive, dict(os.environ)), daemon=True).start()
        running = begin("run", file, "--run-dir", run, "limits.outage_s=1", to="")
        while not list(run.glob("journal/*1.json")):
            if not running.is_alive():
                return 91
            time.sleep(0.02)
        with suppress(OSError), Path(disk, "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1 << 16))
        running.join()
        Path(told, "code").write_text(str(running.exitcode))
        Path(disk, "ballast").unlink()
        resumed = begin("resume", run, to="resumed-")
        resumed.join()
    shutil.copytree(run, kept)
    return resumed.exitcode or 0


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="a full disk needs a mount of its own, and this machine allows no user namespaces (unshare -rm)",
)
def test_a_full_disk(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    """The run directory lies on a file system that is filled up in mid-step; then there is room again."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    begun = ForkedCommand(fill_up, [str(path) for path in (job.file, disk, kept, tmp_path)], ENV)
    _, errors = begun.communicate(timeout=280)
    assert begun.returncode == 0, errors
    assert (tmp_path / "code").read_text().strip() not in ("0", "-9")
    error = (tmp_path / "err").read_text()
    assert "Traceback" not in error
    assert " is full" in error.splitlines()[-1]
    assert_same(kept, undisturbed)
