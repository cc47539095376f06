"""The code example's files: its truths are true, its prompts apart, and a job of it runs its code in the sandbox."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from functions.sandbox.local import check_here
from functions.sandbox.program import SandboxError
from tests.support.tiny_job import command

EXAMPLE = Path(__file__).parents[2] / "examples" / "code"
PASS = "val-core/code/reward/mean@1"


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_code", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


prepare = module()


@pytest.fixture
def sandbox() -> None:
    try:
        check_here()
    except SandboxError as error:
        pytest.skip(str(error))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text().splitlines()]


@pytest.mark.parametrize("name", ["train.jsonl", "validation.jsonl"])
def test_every_truth_is_true(name: str) -> None:
    """By Python itself, from the words of the prompt; and a careless function fails now and then, not always."""
    wrong = 0
    for row in rows(name):
        start, *rest = row["prompt"][0]["content"].rsplit(" ", 4)
        problem = (start, rest[0], int(rest[1]), rest[2], int(rest[3]))
        tests = json.loads(row["reward_model"]["ground_truth"])
        for careless in (False, True):
            made: dict[str, Any] = {}
            exec(prepare.function(problem, careless=careless), made)
            right = [
                made["f"](*given) == wanted for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)
            ]
            assert careless or all(right)
            wrong += careless and not all(right)
    assert 0.4 < wrong / len(rows(name)) < 0.8


def test_what_is_measured_is_not_trained_on() -> None:
    asked = [{row["prompt"][0]["content"] for row in rows(f"{name}.jsonl")} for name in ("train", "validation")]
    assert not asked[0] & asked[1]
    assert [len(a) for a in asked] == [prepare.TRAIN, prepare.VALIDATION]


def metrics(tmp_path: Path, *overrides: str) -> list[dict[str, Any]]:
    run = ("run", EXAMPLE / "job.toml", "--run-dir", tmp_path / "run", "telemetry.tensorboard=false")
    done = command(*run, *overrides, timeout_s=900)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_two_steps(sandbox: None, tmp_path: Path) -> None:
    small = ("steps=2", "data.prompts_per_step=4", "rollout.n=4", "validation.every=0")
    steps = metrics(tmp_path, *small)
    scores = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    assert len(scores) == 2
    assert all(0 <= score <= 1 for score in scores)
    assert sum(scores) > 0


@pytest.mark.slow
def test_it_learns(sandbox: None, tmp_path: Path) -> None:
    """And the run's policy, sampled from by the command for it, writes functions that are right."""
    passed = [step[PASS] for step in metrics(tmp_path) if PASS in step]
    assert passed[-1] >= passed[0] + 0.2
    out = tmp_path / "responses.jsonl"
    done = command("sample", tmp_path / "run", EXAMPLE / "validation.jsonl", out, "--temperature=0", timeout_s=300)
    assert done.returncode == 0, done.stderr
    right = 0
    for row in map(json.loads, out.read_text().splitlines()):
        tests = json.loads(row["reward_model"]["ground_truth"])
        made: dict[str, Any] = {}
        exec(row["responses"][0], made)
        right += [made["f"](*given) for given in tests["inputs"]] == tests["outputs"]
    assert right >= 0.9 * prepare.VALIDATION
