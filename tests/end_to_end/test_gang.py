"""A job whose train stage is a gang of two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_job import Job, command, here, history, metrics

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


def test_a_job_that_trains_with_two_replicas_that_share_each_layer(job: Job, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mesh = ("functions.train.replicas=2", "functions.train.parallel.tp=2")
    done = command("run", job.file, "--run-dir", run, *mesh, "deterministic=false", "steps=2", "validation.every=0")
    assert done.returncode == 0, done.stderr
    assert len(history(run)) == 3  # the beginning and two steps
    assert [line["training/global_step"] for line in metrics(run) if "actor/grad_norm" in line] == [1, 2]
    ranks = {log.name for log in (run / "logs").glob("train-*.log")}
    assert {"train-0.log", "train-1.log"} <= ranks


def test_a_deterministic_job_refuses_a_gang(job: Job, tmp_path: Path) -> None:
    done = here("run", job.file, "--run-dir", tmp_path / "run", "functions.train.replicas=2")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "functions.train.replicas: got 2, deterministic = true wants 1" in line
