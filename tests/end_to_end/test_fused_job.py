"""A PPO job whose actor and critic train in one gang of two pipeline stages, from the job file to the versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_job import command, make_job


@pytest.mark.slow
def test_a_ppo_job_with_stages_trains_both_models_in_one_call(tmp_path: Path) -> None:
    job = make_job(tmp_path, steps=2)
    text = (
        job.file.read_text().replace("deterministic = true\n", "").replace("steps = 2\n", 'steps = 2\nrecipe = "ppo"\n')
    )
    job.file.write_text(text + "[functions.train]\nreplicas = 2\nparallel = { pp = 2 }\n")
    ended = command("run", job.file, "--run-dir", tmp_path / "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    paths = (tmp_path / "run" / "weights").glob("*/v000002*/manifest.json")
    last = [json.JSONDecoder().raw_decode(path.read_bytes().decode(errors="replace"))[0] for path in paths]
    assert sorted(manifest["version"]["model"] for manifest in last) == ["actor", "critic"]
    assert len({manifest["version"]["call"] for manifest in last}) == 1, "of one call"
    for manifest in last:
        assert manifest["trainer"]["result"]["stats"]["ranks"] == 2
        assert 1 < manifest["trainer"]["result"]["stats"]["held_micro_batches"] <= 3
