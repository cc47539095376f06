"""A job whose training is streamed while generation goes on: every sample trains once, whatever is killed; a
deterministic one commits what it commits without."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.tail_function import streaming
from tests.support.tiny_job import STEPS, Background, Job, Seen, assert_same, command, history

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(600)]

ADAPTIVE = ["planner.policy=adaptive", "planner.objective=speed", "functions.generate.replicas=1"]


def test_a_streamed_job_with_kills_trains_every_sample_once(job: Job, tmp_path: Path) -> None:
    dice, run = random.Random(3), tmp_path / "run"
    words: list[object] = ["run", run, job.file, "deterministic=false", "functions.generate.replicas=1"]
    for step in (1, 2):
        orchestrator = Background(*words, main=streaming)
        orchestrator.wait_for((run / "journal" / f"{step:06d}.json").exists)
        seen, few = Seen(run), dice.randint(1, 4)
        before = seen()
        orchestrator.wait_for(lambda: seen() >= before + few or orchestrator.process.poll() is not None)  # noqa: B023
        orchestrator.kill()
        words = ["resume", run]
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in history(run)] == list(range(STEPS + 1))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line.get("critic/groups")}
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert all(line["critic/groups"] == 3 for line in steps.values())
    assert any(line.get("rollout/fed_batches/train", 0) >= 1 for line in steps.values())


def test_a_deterministic_job_commits_the_same_when_its_trainer_is_started_ahead(
    job: Job, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = command("run", job.file, "--run-dir", run, *ADAPTIVE[:2])
    assert done.returncode == 0, done.stderr
    assert_same(run, undisturbed)
