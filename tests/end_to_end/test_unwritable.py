"""What is only shown cannot be written: told, on the terminal too, and no loss to the job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.tiny_job import ENV, Job, arguments, assert_same

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


def on_a_terminal(*words: object) -> tuple[int, str]:
    """Exit code of the command, and what a terminal that can only print lines has shown."""
    ours, its = os.openpty()
    env = ENV | {"TERM": "dumb", "COLUMNS": "400"}
    process = subprocess.Popen(arguments(*words), env=env, stdin=its, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # as Linux tells the end of a terminal
        pass
    finally:
        os.close(ours)
    return process.wait(), shown.decode()


def test_what_cannot_be_shown_is_told_once_and_the_job_ends_with_its_model(
    job: Job, undisturbed: Path, tmp_path: Path
) -> None:
    """Also told: a prompt that was dropped for its length, without which the job is the undisturbed one."""
    shutil.copytree(job.directory, tmp_path / "job")
    with (tmp_path / "job" / "train.jsonl").open("a") as rows:
        long = {"data_source": "sums", "prompt": "1+" * 20 + "1=", "reward_model": {"ground_truth": "1"}}
        rows.write(json.dumps(long) + "\n")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("now.json", "prometheus.json"):
        (run / f".{name}.new").mkdir()  # which no write and no cleaning up gets out of its way
    code, shown = on_a_terminal(
        "run", tmp_path / "job" / "job.toml", "--run-dir", run, "data.over_long=drop", "data.max_prompt_length=20"
    )
    assert code == 0, shown
    assert_same(run, undisturbed)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    notes = [event["data"]["message"] for event in events if event["type"] == "note"]
    assert events[-1]["type"] == "finished"
    kinds = Counter(note.split(":")[0] for note in notes)
    assert kinds["data.train"] == 1
    assert kinds["now"] == 2, "when it began, and that it was so until the end"
    assert all("Is a directory" in note for note in notes if note.startswith(("now", "counts")))
    assert "1 of 9 prompts are over the length limit" in notes[0]
    assert notes[0] in shown
    assert "now.json: cannot be written: Is a directory" in shown
    assert not (run / "now.json").exists()
    json.loads((run / "trace.json").read_text())
