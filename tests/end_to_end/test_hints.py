"""Hints follow the journal, and a resumed job's replicas follow none of the execution before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from functions.exchange.directory import DirectoryExchange
from functions.wire import Hint, Load, Version, hint_key
from tests.support.tiny_job import STEPS, Background, Job, assert_same, command

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


def committed(run: Path, step: int) -> dict[str, Any]:
    record: dict[str, Any] = json.JSONDecoder().raw_decode((run / "journal" / f"{step:06d}.json").read_text())[0]
    return record


def hint(run: Path) -> Hint:
    return Hint.from_json(json.loads(DirectoryExchange(run).get(hint_key("generate"))))


def newest(run: Path, step: int) -> list[Load]:
    return [Load("generate", {"policy": Version.from_json(committed(run, step)["pointers"]["versions"]["actor"])})]


def test_hints_name_what_is_committed_and_change_nothing(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    orchestrator = Background("run", job.file, "--run-dir", run)
    orchestrator.wait_for((run / "journal" / "000002.json").exists)
    orchestrator.kill()
    found = hint(run)
    assert found.epoch == 1
    if found.loads[0].weights["policy"].number == 2:  # else the next step had trained when it was killed
        assert found.loads == newest(run, 2)
    gone = Hint(1, [Load("generate", {"policy": Version("actor", 77, "gone")})])
    DirectoryExchange(run).put(hint_key("generate"), json.dumps(gone.to_json()).encode())
    done = command("resume", run)
    assert done.returncode == 0, done.stderr
    assert hint(run) == Hint(2, newest(run, STEPS))
    assert_same(run, undisturbed)
    said = [log.read_text() for log in (run / "logs").glob("generate-*.log")]
    assert said
    assert not [text for text in said if "v000077" in text]
