"""Ordinary settings that were not made to meet: as many samples of a training prompt as of a held-out one, or one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.tiny_job import Job, command

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]

HELD_OUT = "val-core/sums/reward/mean@"


@pytest.mark.parametrize(
    ("recipe", "n", "held_out_n"),
    [("reinforce_plus_plus", 1, 1), ("grpo", 2, 2), ("remax", 1, 1), ("remax", 2, 1)],
)
def test_what_is_validated_does_not_depend_on_what_was_planned(
    job: Job, undisturbed: Path, tmp_path: Path, recipe: str, n: int, held_out_n: int
) -> None:
    """Greedy answers to all held-out prompts, by the model that each of these jobs starts from: the same scores,
    whatever number of samples the step's plan is for. A step trains on its own samples, all of them."""
    run = tmp_path / "run"
    done = command(
        "run", job.file, "--run-dir", run, f"recipe={recipe}", f"rollout.n={n}", f"validation.n={held_out_n}",
        "validation.every=1", "validation.temperature=0.0", "steps=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    with (undisturbed / "metrics.jsonl").open() as lines:
        expected = json.loads(lines.readline())[f"{HELD_OUT}1"]
    assert before[f"{HELD_OUT}{held_out_n}"] == pytest.approx(expected, abs=1e-9)
    assert f"{HELD_OUT}{held_out_n}" in after
    scored = [json.loads(line) for line in (run / "samples" / "000001.jsonl").read_text().splitlines()]
    sampled = sorted({(sample["group"], sample["index"]) for sample in scored})
    assert sampled == [(group, index) for group in range(3) for index in range(n)]


def test_a_step_that_has_nothing_to_train_is_passed(job: Job, tmp_path: Path) -> None:
    """DAPO draws in vain where every score is the same: a resume would come to the same step, so it goes on. Where
    nothing could be scored it ends, and says why."""
    shutil.copytree(job.directory, tmp_path / "job")
    (tmp_path / "job" / "reward.py").write_text(
        "def same(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n"
        "def away(data_source, solution_str, ground_truth, extra_info=None):\n    raise ValueError('it is away')\n"
    )
    run, small = tmp_path / "run", ("steps=1", "validation.every=0", "rollout.n=2")
    done = command(
        "run", tmp_path / "job" / "job.toml", "--run-dir", run, "recipe=dapo", "reward.score=reward.py:same", *small
    )
    assert done.returncode == 0, done.stderr
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["actor/skipped_updates"], row["actor/grad_norm"]) == (1, 0)
    done = command(
        "run", tmp_path / "job" / "job.toml", "--run-dir", tmp_path / "away", "reward.score=reward.py:away",
        "reward.on_error=drop", *small,
    )  # fmt: skip
    assert "step 1: no sample has a score; the first says: " in done.stderr.splitlines()[-1]
