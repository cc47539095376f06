"""Whole jobs that lose their storage: they wait, make again what is gone, and end by themselves with the history,
metrics and weights of an undisturbed run. Where it lasts for too long: one clear line, an exit code that is not 0, and
`resume` does the same."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from functions.base.wire import Json
from tests.exchange.servers import LosesAnswers, Meanwhile, MotoServer, RedisServer
from tests.support.tiny_job import ENV, STEPS, Background, Job, arguments, assert_same, command, history, metrics

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


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="a full disk needs a mount of its own, and this machine allows no user namespaces (unshare -rm)",
)
def test_a_full_disk(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    """The run directory lies on a file system that is filled up in mid-step; then there is room again."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    run = disk / "run"
    started = shlex.join(arguments("run", job.file, "--run-dir", run, "limits.outage_s=1"))
    resumed = shlex.join(arguments("resume", run))
    script = f"""
        mount -t tmpfs -o size=64m none {disk} || exit 90
        {started} >{tmp_path}/out 2>{tmp_path}/err &
        until set -- {run}/journal/*1.json; [ -e "$1" ]; do kill -0 $! || exit 91; sleep 0.02; done
        cat /dev/zero >{disk}/ballast
        wait $!; echo $? >{tmp_path}/code
        rm {disk}/ballast
        {resumed} || exit 92
        cp -r {run} {kept}
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], env=ENV, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "code").read_text().strip() not in ("0", "137")
    error = (tmp_path / "err").read_text()
    assert "Traceback" not in error
    assert " is full" in error.splitlines()[-1]
    assert_same(kept, undisturbed)
