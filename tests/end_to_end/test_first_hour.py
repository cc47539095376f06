"""What a stranger types first works: the smallest job, from its file to its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_job import Job, command

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]

MINIMAL = """
name = "minimal"
steps = 1
[model]
path = "{directory}/model"
[data]
train = "{directory}/train.jsonl"
[rollout]
max_response_length = 8
[reward]
score = "rule:number"
"""


def test_a_job_of_name_steps_model_data_and_reward_runs(job: Job, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(MINIMAL.format(directory=job.directory))
    done = command("run", tmp_path / "job.toml", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert not any(key.startswith("val-core/") for row in rows for key in row)
