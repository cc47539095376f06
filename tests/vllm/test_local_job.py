"""A whole job with vLLM as its engine, on the local platform: replicas forked from a parent with vLLM loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_job import assert_nothing_left, command, make_job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_a_job_runs_on_vllm_and_its_samples_are_those_of_the_trained_weights(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", head_dim=32)
    run = tmp_path / "run"
    done = command(
        "run", job.file, "--run-dir", run, "steps=3", "deterministic=false", "rollout.engine=vllm",
        "rollout.vllm.kv_cache_mb=64", "algorithm.max_rollout_logprob_diff=1e-4", timeout_s=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in metrics if "actor/grad_norm" in line]
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert all(line["rollout_corr/abs_diff_mean"] < 1e-4 for line in trained), "never a stale version"
    assert any(line["actor/grad_norm"] > 0 for line in trained), "the weights did change between the steps"
    assert_nothing_left()
