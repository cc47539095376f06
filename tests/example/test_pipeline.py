"""examples/pipeline.sh whole: SFT, reward model, PPO, each from what the one before has made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_job import ENV

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_pipeline_goes_from_sft_to_ppo(tmp_path: Path) -> None:
    command = tmp_path / "rlhf"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m orchestrator.commands "$@"\n')
    command.chmod(0o755)
    environment = ENV | {"RLHF_ORCHESTRATE": str(command), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", ROOT / "examples" / "pipeline.sh", tmp_path / "out", "4"], env=os.environ | environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def metrics(run: str) -> list[dict[str, Any]]:
        lines = (tmp_path / "out" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines][1:]

    assert metrics("sft")[-1]["sft/loss"] < metrics("sft")[0]["sft/loss"]
    assert metrics("rm")[-1]["rm/loss"] < metrics("rm")[0]["rm/loss"]
    assert {"critic/score/mean", "critic/vf_loss"} <= set(metrics("ppo")[-1])
    assert done.stdout.count("what was answered:") == 3
