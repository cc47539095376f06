"""Whatever is killed, whenever: `resume` ends with the history, metrics and weights of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from functions.base.wire import Hint, Load, Version, hint_key
from functions.exchange.directory import DirectoryExchange
from tests.support.processes import who_logs_to
from tests.support.tiny_job import STEPS, Background, Job, Seen, assert_same, command

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(600)]


def record(run: Path, step: int) -> Path:
    return run / "journal" / f"{step:06d}.json"


def test_killed_at_every_journal_boundary(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    """Once a hint of the execution before names a version that was never made: no replica follows it."""
    run, exchange = tmp_path / "run", DirectoryExchange(tmp_path / "run")
    gone = Hint(3, [Load("generate", {"policy": Version("actor", 77, "gone")})])
    words: list[object] = ["run", job.file, "--run-dir", run]
    for step in range(STEPS + 1):
        orchestrator = Background(*words)
        orchestrator.wait_for(record(run, step).exists)
        orchestrator.kill()
        words = ["resume", run]
        if step == 1:
            exchange.put(hint_key("generate"), json.dumps(gone.to_json()).encode())
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert_same(run, undisturbed)
    committed = json.JSONDecoder().raw_decode(record(run, STEPS).read_text())[0]["pointers"]["versions"]["actor"]
    newest = Hint(STEPS + 1, [Load("generate", {"policy": Version.from_json(committed)})])
    assert Hint.from_json(json.loads(exchange.get(hint_key("generate")))) == newest
    said = [log.read_text() for log in (run / "logs").glob("generate-*.log")]
    assert said
    assert not [text for text in said if "v000077" in text]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 20])
def test_orchestrator_killed_at_random_events(job: Job, undisturbed: Path, tmp_path: Path, kills: int) -> None:
    """When its functions have told so many events, wherever that is in a step."""
    dice, run = random.Random(kills), tmp_path / "run"
    words: list[object] = ["run", job.file, "--run-dir", run]
    for _ in range(kills):
        orchestrator = Background(*words)
        if (run / "run.json").exists():
            words = ["resume", run]
        orchestrator.wait_for((run / "lease").exists)
        seen, few = Seen(run), dice.randint(0, 30)
        before = seen()
        orchestrator.wait_for(lambda: seen() >= before + few or orchestrator.process.poll() is not None)  # noqa: B023
        orchestrator.kill()
        words = ["resume", run] if (run / "run.json").exists() else words
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert_same(run, undisturbed)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_functions_killed_at_random_events(job: Job, undisturbed: Path, tmp_path: Path, kills: int) -> None:
    """A function that dies is called again; the job goes on by itself."""
    dice, run = random.Random(kills), tmp_path / "run"
    orchestrator = Background("run", job.file, "--run-dir", run, "limits.attempts=20")
    seen, killed, awaited = Seen(run), 0, 0
    while killed < kills and orchestrator.process.poll() is None:
        awaited = seen() + dice.randint(1, 5)
        orchestrator.wait_for(lambda: seen() >= awaited or orchestrator.process.poll() is not None)  # noqa: B023
        logs = sorted((run / "logs").glob("*-[0-9]*.log"))
        if replicas := [pid for log in logs for pid in who_logs_to(log)]:
            with suppress(ProcessLookupError):
                os.kill(dice.choice(replicas), signal.SIGKILL)
                killed += 1
    output, _ = orchestrator.process.communicate(timeout=500)
    assert orchestrator.process.returncode == 0, output
    assert killed, "the run ended before anything was killed"
    assert_same(run, undisturbed)
