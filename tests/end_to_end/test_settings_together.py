"""Ordinary settings that were not made to meet: as many samples of a training prompt as of a held-out one, or one."""

from __future__ import annotations

import json
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
