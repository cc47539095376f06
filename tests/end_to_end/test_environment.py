"""A job whose samples have turns, killed between them and in mid-answer, has the history of one that was left alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.environment_job import SETTINGS, add_environment
from tests.support.tiny_job import ENV, Background, Job, assert_same, command, here, make_job


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = make_job(tmp_path_factory.mktemp("job"), steps=2)
    add_environment(job)
    return job


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the environment was asked, a line each."""
    path = tmp_path / "asked"
    monkeypatch.setitem(ENV, "ENVIRONMENT_LOG", str(path))
    return path


@pytest.mark.slow
def test_a_harness_killed_and_resumed(told: Job, tmp_path: Path, leaks_nothing: None) -> None:
    """OpenAI's client, unmodified, while the job generates: what it asks is what is trained on, whoever was killed."""
    pytest.importorskip("openai", reason="the package openai is not installed")
    words = [*SETTINGS, "environment.kind=agent.py:Agent", "steps=1", "data.max_prompt_length=32"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    done = command("run", told.file, "--run-dir", undisturbed, *words)
    assert done.returncode == 0, done.stderr
    [last] = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()][-1:]
    assert last["environment/turns"] > 1
    assert last["environment/failed"] == 0
    assert last["rollout_corr/abs_diff_mean"] < 1e-4, "what was said is what is trained on"
    first = Background("run", told.file, "--run-dir", run, *words)
    first.wait_for(lambda: answers(run) >= 20)
    first.kill()
    done = command("resume", run)
    assert done.returncode == 0, done.stderr
    assert_same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "turns"), [("environment.py:Game", ["t01", "t02", "t03"]), ("agent.py:Agent", ["t00", "t01", "t02"])]
)
def test_killed_at_every_turn_boundary_and_in_mid_tool(
    kind: str, turns: list[str], told: Job, tmp_path: Path, leaks_nothing: None, log: Path
) -> None:
    """Orchestrator after orchestrator: one dies when a turn's first answer is recorded, the next while one is made."""
    words = [*SETTINGS, f"environment.kind={kind}", "steps=1", "data.max_prompt_length=32"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    done = command("run", told.file, "--run-dir", undisturbed, *words)
    assert done.returncode == 0, done.stderr

    def killed(condition: Callable[[], bool]) -> None:
        begun = Background(*(("resume", run) if run.exists() else ("run", told.file, "--run-dir", run, *words)))
        begun.wait_for(condition)
        begun.kill()

    committed = run / "journal" / "000001.json"
    for turn in turns:
        pattern = f"calls/s*.episodes/gen/*/{turn}*"
        killed(lambda pattern=pattern: any(run.glob(pattern)) or committed.exists())  # type: ignore[misc]
        log.write_text("")
        killed(lambda: log.stat().st_size > 0 or committed.exists())
    assert not committed.exists(), "all of them died before the end"
    done = command("resume", run)
    assert done.returncode == 0, done.stderr
    assert_same(run, undisturbed)


def answers(run: Path) -> int:
    return len(list(run.glob("calls/s*.episodes/gen/*/t*")))


def test_killed_between_turns_and_in_mid_answer(told: Job, tmp_path: Path, leaks_nothing: None, log: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    done = command("run", told.file, "--run-dir", undisturbed, *SETTINGS)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert all(m["environment/turns"] > 1 for m in metrics[1:]), "episodes go on"
    line = json.loads((undisturbed / "samples" / "000001.jsonl").read_text().splitlines()[0])
    assert line["conversation"][0]["role"] == "assistant"
    off = [abs(d) for turn in line["conversation"] for d in turn.get("difference", ()) if d is not None]
    assert statistics.fmean(off) == pytest.approx(line["mismatch"], abs=1e-6)
    books = json.loads((undisturbed / "cost.json").read_text())
    assert "environment" in books["functions"], "one row in the books"
    asked = sorted(log.read_text().splitlines())
    log.unlink()
    cost, plan = here("cost", undisturbed), here("plan", told.file, "--run", undisturbed, *SETTINGS)
    assert "replica-seconds did not wait for tools" in cost.stdout, cost.stderr
    assert "an answer takes" in plan.stdout, f"what the run learned of its environment {plan.stderr}"

    run = tmp_path / "run"
    first = Background("run", told.file, "--run-dir", run, *SETTINGS)
    first.wait_for(lambda: answers(run) >= 3)
    first.kill()
    between = Background("resume", run)
    between.wait_for(lambda: log.read_text().count("\n") > len(asked) // 3)
    between.kill()
    done = command("resume", run)
    assert done.returncode == 0, done.stderr
    assert_same(run, undisturbed)
    assert set(log.read_text().splitlines()) == set(asked), "the same questions, whoever asked them"
