"""What `run` refuses before it starts anything, `POST /v1/jobs` and `doctor` refuse with the same line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.base.errors import OrchestratorError
from orchestrator.job.config import parse_job
from orchestrator.recipes.settings import merged
from orchestrator.session.open_platform import check_machine
from orchestrator.session.session import prepare
from tests.api.conftest import JOB
from tests.support.tiny_job import Job, command, here

CASES: dict[str, dict[str, Any]] = {
    "rule": {"reward": {"score": "rule:gsm9k"}},
    "scorer": {"reward": {"score": "gone.py:score"}},
    "option": {"algorithm": {"loss_options": {"clip": 0.1}}},
    "cap": {"algorithm": {"correction": {"cap": 0}}},
    "statistic": {"algorithm": {"correction": {"reject": {"token_k9": 1.0}}}},
    "model": {"model": {"path": "nothing"}},
    "data": {"data": {"train": "gone.jsonl"}},
    "row": {"data": {"train": "bad.jsonl"}},
    "long": {"data": {"max_prompt_length": 1}},
    "gpus": {"functions": {"generate": {"gpus": 1000}}},
}


def as_run(table: dict[str, Any], root: Path) -> None:
    job = parse_job(table, base=root)
    check_machine(job, prepare(job).specs)


@pytest.mark.parametrize("case", CASES)
def test_a_post_is_refused_as_a_run_is(case: str, api: httpx.Client, runs: Path, root: Path) -> None:
    (root / "bad.jsonl").write_text("{not json\n")
    table = merged(JOB, CASES[case])
    with pytest.raises(OrchestratorError) as told:
        as_run(table, root)
    before = sorted(path.name for path in runs.iterdir())
    answer = api.post("/v1/jobs", json=table)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"] == str(told.value).splitlines()
    assert sorted(path.name for path in runs.iterdir()) == before


def test_a_users_own_recipe_is_not_run_by_the_server(api: httpx.Client, root: Path) -> None:
    ran = root / "ran"
    (root / "own.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\n\n\ndef mine(step):\n    ...\n"
    )
    assert api.post("/v1/jobs", json=JOB | {"recipe": "own.py:mine"}).status_code == 201
    answer = api.post("/v1/jobs", json=JOB | {"recipe": "own.py:yours"})
    assert (answer.status_code, ["own.py has no 'yours'" in line for line in answer.json()["errors"]]) == (422, [True])
    assert not ran.exists()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    from tests.support.tiny_job import make_job

    return make_job(tmp_path_factory.mktemp("job"))


def test_gpus_that_are_not_here_are_no_cpu(job: Job, tmp_path: Path) -> None:
    done = here("run", job.file, "--run-dir", tmp_path / "run", "functions.train.gpus=1000")
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "functions.train.gpus: got 1000, this machine has" in line
    assert not (tmp_path / "run").exists()


def test_the_doctor_says_it_too(job: Job, tmp_path: Path) -> None:
    text = job.file.read_text() + "[algorithm.correction]\ncap = 0\n"
    bad = job.directory / "bad.toml"
    bad.write_text(text)
    done = here("doctor", bad)
    assert done.returncode == 1
    assert "FAIL  settings: algorithm.correction: cap: got 0.0, wants a number above 0" in done.stdout
    done = here("doctor", job.file)
    assert "ok    settings: wants generate, reward, train" in done.stdout, done.stdout


def test_a_job_that_is_refused_late_leaves_nothing(job: Job, tmp_path: Path) -> None:
    """Weights that are no numbers are found as they are read: the mended job may have the run's directory."""
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "model"
    broken.mkdir()
    for path in (job.directory / "model").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = load_file(broken / "model.safetensors")
    name = min(weights)
    weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    run = tmp_path / "run"
    done = command("run", job.file, "--run-dir", run, f"model.path={broken}", "steps=1")
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert json.dumps(name).strip('"') in line
    assert "not finite" in line
    assert not run.exists()
