"""The tools example: its files are what its script makes, its job runs, and its model learns when to call the tool."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.tiny_job import command

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_files_are_those_of_the_script(prepare: ModuleType, tmp_path: Path) -> None:
    every = prepare.problems(prepare.VALIDATION + prepare.TRAIN, random.Random(prepare.SEED))
    for name, part in (("validation", every[: prepare.VALIDATION]), ("train", every[prepare.VALIDATION :])):
        assert (EXAMPLE / f"{name}.jsonl").read_text() == "".join(prepare.row(problem) + "\n" for problem in part)
    prepare.write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (EXAMPLE / "model" / name).read_text() == (tmp_path / name).read_text()


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_steps_run(tmp_path: Path) -> None:
    """Tools are called, what is called answers, and an answer is read: what follows it is what it said."""
    shutil.copytree(EXAMPLE, tmp_path / "tools")
    words = ["steps=2", "validation.every=0", "validation.at_start=false", "telemetry.samples=256"]
    done = command("run", tmp_path / "tools" / "job.toml", "--run-dir", tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    last = metrics(tmp_path / "run")[-1]
    assert 0.05 < last["environment/tool_calls"] < 0.6
    assert last["environment/failed"] == 0
    assert last["rollout_corr/abs_diff_mean"] < 1e-4, "what was said is what is trained on"
    lines = [json.loads(line) for line in (tmp_path / "run/samples/000001.jsonl").read_text().splitlines()]
    used = [line["conversation"] for line in lines if len(line["conversation"]) == 3]
    assert used
    right = [said[2]["content"] == said[1]["content"] for said in used if said[1]["content"].isdigit()]
    assert sum(right) > 0.8 * len(right)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["dr_grpo", "grpo", "rloo", "gigpo"])
def test_it_learns(recipe: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "tools")
    done = command(
        "run", tmp_path / "tools" / "job.toml", "--run-dir", tmp_path / "run", f"recipe={recipe}", timeout_s=580
    )
    assert done.returncode == 0, done.stderr
    first, last = metrics(tmp_path / "run")[0], metrics(tmp_path / "run")[-1]
    assert first["val-core/hard/reward/mean@1"] < 0.1
    assert last["val-core/hard/reward/mean@1"] > 0.7
    assert last["val-core/easy/reward/mean@1"] > 0.9, "without the tool, which costs"
