"""Every bad input: one clear line on standard error, an exit code that is not 0, nothing lost, `resume` works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.tiny_job import Background, Job, assert_same, command, here

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


@pytest.fixture
def broken(job: Job, tmp_path: Path) -> Job:
    """A copy of the tiny job, to be broken."""
    shutil.copytree(job.directory, tmp_path / "job")
    return Job(tmp_path / "job")


def refused(job: Job, *overrides: str) -> str:
    """The one line with which the job is refused before anything is started."""
    run = job.directory / "run"
    done = here("run", job.file, "--run-dir", run, *overrides)
    assert done.returncode != 0, done.stdout
    (line,) = done.stderr.splitlines()
    return line


def test_a_key_that_is_none(broken: Job) -> None:
    assert "rollout.temprature: unknown key; did you mean 'rollout.temperature'?" in refused(
        broken, "rollout.temprature=1.0"
    )
    assert "algorithm: advantage: got 'gro', wants one of grpo" in refused(broken, "algorithm.advantage=gro")
    assert "did you mean 'grpo'?" in refused(broken, "recipe=grop")


def test_a_model_directory_that_is_none(broken: Job) -> None:
    (broken.directory / "empty").mkdir()
    assert "model.path" in refused(broken, "model.path=empty")


@pytest.mark.parametrize(
    ("line", "message"),
    [("{not json", "train.jsonl:2: not a line of JSON"), ('{"text": "a"}', "train.jsonl:2: no field 'prompt'")],
)
def test_a_data_line_that_is_none(broken: Job, line: str, message: str) -> None:
    path = broken.directory / "train.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n" + line + "\n")
    assert message in refused(broken)


def test_prompts_over_the_limit_are_named(broken: Job) -> None:
    line = refused(broken, "data.max_prompt_length=3")
    assert "8 of 8 prompts are over the length limit" in line
    assert "train.jsonl:1 (4 tokens)" in line


def test_a_run_directory_in_use_or_of_another_kind(broken: Job) -> None:
    run = broken.directory / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"format": 99, "job": "tiny"}))
    assert "holds a run already" in refused(broken)
    resumed = here("resume", run)
    assert resumed.returncode == 1
    assert "made by another version (format 99, this one reads 2)" in resumed.stderr
    assert "no run directory" in here("status", broken.directory).stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        pytest.param("return None", "None", marks=pytest.mark.slow),
        pytest.param("return float('nan')", "nan", marks=pytest.mark.slow),
    ],
)
def test_a_reward_function_that_fails_stops_the_step_and_resume_works(
    broken: Job, undisturbed: Path, body: str, message: str
) -> None:
    """The scorer fails on one prompt: what is committed before stays, and a mended scorer finishes the job."""
    reward, run = broken.directory / "reward.py", broken.directory / "run"
    good = reward.read_text()
    failing = f"    if ground_truth == '5' and extra_info is None:\n        {body}\n"
    head, _, tail = good.partition('asked for."""\n')
    reward.write_text(f'{head}asked for."""\n{failing}{tail}')
    done = command("run", broken.file, "--run-dir", run)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
    assert "group" in line
    reward.write_text(good)
    resumed = command("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert_same(run, undisturbed)


def test_two_orchestrators_on_one_run(broken: Job) -> None:
    run = broken.directory / "run"
    first = Background("run", broken.file, "--run-dir", run)
    first.wait_for((run / "lease").exists)
    second = here("resume", run)
    assert second.returncode == 1
    assert f"another orchestrator (process {first.process.pid}) is working on this run" in second.stderr
    cancelled = here("cancel", run)
    assert cancelled.returncode == 0, cancelled.stderr
    output, _ = first.process.communicate(timeout=250)
    assert first.process.returncode == 130, output
    assert "stopped; go on with" in output


def test_a_store_that_is_away(broken: Job) -> None:
    run = broken.directory / "run"
    done = command("run", broken.file, "--run-dir", run, "exchange.url=redis://127.0.0.1:1/0", "limits.outage_s=1")
    assert done.returncode not in (0, -9), done.stdout
    (line,) = done.stderr.splitlines()
    assert "127.0.0.1:1" in line
