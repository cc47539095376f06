"""What other systems did otherwise after a resume without saying so (docs/reliability.md has the table)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.tiny_job import STEPS, Background, Job, assert_nothing_left, assert_same, command, here, make_job

EPOCHS = ("data.prompts_per_step=8", "validation.every=0", "algorithm.kl.coef=0.1", "train.lr=0.05")
"""Each step is an epoch of the job's eight rows, so that every commit lies at an epoch's boundary."""


@pytest.mark.timeout(300)
def test_resumed_at_the_boundaries_of_epochs(tmp_path: Path) -> None:
    """verl#5725, verl#7401: no steps were trained after a resume between epochs, and the job ended well.
    NeMo-RL#2955: the penalty's reference was the resumed policy. labs-molt#130: the optimizer began anew.
    verl#6232: a finished job that was started again trained a further step.

    Reference and optimizer show in the metrics: the penalty is 0 at the start alone, and a step's update follows
    from its momenta.
    """
    job = make_job(tmp_path / "job")
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = command("run", job.file, "--run-dir", whole, *EPOCHS)
    assert done.returncode == 0, done.stderr
    words: list[object] = ["run", job.file, "--run-dir", run, *EPOCHS]
    for step in (1, 2):
        orchestrator = Background(*words)
        orchestrator.wait_for((run / "journal" / f"{step:06d}.json").exists)
        orchestrator.kill()
        words = ["resume", run]
    refuse_other_rows(job, run)
    for _ in range(2):
        resumed = command("resume", run)
        assert resumed.returncode == 0, resumed.stderr
        assert_same(run, whole)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "actor/grad_norm" in line]
    assert [line["training/global_step"] for line in trained] == list(range(1, STEPS + 1))
    assert all(line["critic/groups"] == 8 for line in trained), "a step is a whole epoch"
    assert all(line["actor/kl_loss"] > 1e-5 for line in trained[1:]), "the reference is what the job began with"
    assert_nothing_left()


def refuse_other_rows(job: Job, run: Path) -> None:
    """NeMo-RL#2519: resumed on another data set, the first rows of the new one were skipped."""
    rows = job.directory / "train.jsonl"
    shutil.copy(rows, kept := rows.with_suffix(".kept"))
    rows.write_text(rows.read_text().replace("sums", "more"))
    refused = here("resume", run)
    assert refused.returncode == 2
    assert "data.train has changed since the job began" in refused.stderr
    kept.replace(rows)
