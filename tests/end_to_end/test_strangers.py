"""Two runs of one name in one exchange, and journals that were lost: refused in one line, the other is untouched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.exchange.servers import RedisServer
from tests.support.tiny_job import Job, command, here

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


def refused(*words: object) -> str:
    done = here(*words)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_a_run_of_the_same_name_in_the_same_redis(job: Job, tmp_path: Path, redis: RedisServer) -> None:
    """It does not adopt the other's journal; and a Redis that came back empty is not taken for a job that never ran."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = (job.file, f"exchange.url={redis.url}", "steps=1", "validation.every=0")
    done = command("run", *words, "--run-dir", first)
    assert done.returncode == 0, done.stderr
    line = refused("run", *words, "seed=7", "--run-dir", second)
    assert f":{first})" in line
    assert f":{second})" in line
    assert "name=OTHER" in line
    assert not (second / "model").exists()
    assert command("resume", first).returncode == 0, "the first is as it was"

    redis.stop()
    for file in (tmp_path / "redis").glob("*.rdb"):
        file.unlink()
    redis.start()
    line = refused("resume", first)
    assert f"{first}: step 1 was committed, but the journal is empty" in line
    assert "--from-step 0" in line
    done = command("resume", first, "--from-step", "0")
    assert done.returncode == 0, done.stderr
    events = (first / "events.jsonl").read_text()
    assert "are lost; it goes on from there" in events
    assert events.count('"type": "step", "data": {"step": 1,') == 2, "made again, told again"


def test_a_record_that_is_lost(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    """In a run directory whose name no store would take as a key."""
    run = tmp_path / "Läufe von heute"
    shutil.copytree(undisturbed, run)
    *_, before, tail = sorted((run / "journal").glob("*.json"))
    tail.unlink()
    step = int(before.stem)
    assert f"step {step + 1} was committed, but the journal ends at step {step}" in refused("resume", run)
    assert f"--from-step: got 1, the journal ends at step {step}" in refused("resume", run, "--from-step", 1)
    before.write_bytes(before.read_bytes()[:-20])
    assert "was truncated or altered" in refused("resume", run)
