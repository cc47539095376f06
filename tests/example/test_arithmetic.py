"""The example's files: what they claim to be, and that its model has something to learn and a way to learn it."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


prepare, reward = module("prepare"), module("reward")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text().splitlines()]


def pass_rates(model_dir: Path, prompts: list[dict[str, Any]], samples: int) -> list[float]:
    """Share of right answers among `samples` samples of each prompt (1: greedy), by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(0)
    batch: Any = tokenizer.apply_chat_template(
        [row["prompt"] for row in prompts], add_generation_prompt=True, padding=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip
    kinds: dict[str, Any] = {"do_sample": True, "top_k": 0} if samples > 1 else {"do_sample": False}
    out = model.generate(**batch, max_new_tokens=20, num_return_sequences=samples, **kinds)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    truths = [row["reward_model"]["ground_truth"] for row in prompts for _ in range(samples)]
    right = [reward.compute_score("arithmetic", text, truth) for text, truth in zip(texts, truths, strict=True)]
    return [sum(right[i : i + samples]) / samples for i in range(0, len(right), samples)]


def test_the_teacher_and_his_slips() -> None:
    assert prepare.running_sums((5, 8, 7), (False, False, False)) == [7, 15, 20]
    assert prepare.running_sums((5, 8, 7), (False, True, False)) == [7, 5, 10], "forgotten once, at 7 + 8"
    assert prepare.running_sums((1, 2, 3), (True, True, True)) == [3, 5, 6], "nothing to forget where no ten is passed"
    assert prepare.answer((5, 8, 7), random.Random(0), forget=0.0) == "07 15 20"
    assert prepare.answer((5, 8, 7), random.Random(0), forget=1.0) == "07 05 00"


def test_what_is_measured_is_not_trained_on() -> None:
    asked = {name: [row["prompt"][0]["content"] for row in rows(f"{name}.jsonl")] for name in ("train", "validation")}
    assert not set(asked["train"]) & set(asked["validation"])
    assert len(set(asked["train"])) == len(asked["train"]) == prepare.TRAIN
    assert len(set(asked["validation"])) == len(asked["validation"]) == prepare.VALIDATION


@pytest.mark.slow
def test_the_shipped_prompts_are_those_of_the_script_and_none_was_taught() -> None:
    validation, train, taught = prepare.draw(random.Random(prepare.SEED))
    for name, problems in (("validation.jsonl", validation), ("train.jsonl", train)):
        assert (EXAMPLE / name).read_text() == "".join(prepare.row(digits) + "\n" for digits in problems)
    assert not set(taught) & {*validation, *train}
    assert len(set(taught)) == len(taught) == prepare.SHEETS


@pytest.mark.parametrize("name", ["train.jsonl", "validation.jsonl"])
def test_every_truth_is_true(name: str) -> None:
    for row in rows(name):
        digits = re.findall(r"\d", row["prompt"][0]["content"])
        assert row["reward_model"]["ground_truth"] == str(sum(map(int, digits)))
        assert 2 <= len(digits) == row["extra_info"]["terms"] <= 6


@pytest.mark.parametrize(
    ("response", "score"), [("07 15 20", 1.0), ("20", 1.0), ("07 05 10", 0.0), ("", 0.0), ("20 x", 1.0), ("020 2", 0.0)]
)
def test_reward(response: str, score: float) -> None:
    assert reward.compute_score("arithmetic", response, "20") == score


def test_the_model_starts_where_it_should() -> None:
    """Greedy and sampled at most 0.45; yet most prompts are answered right now and then, so GRPO has a signal."""
    held_out = rows("validation.jsonl")
    greedy = pass_rates(EXAMPLE / "model", held_out, samples=1)
    assert 0.30 <= sum(greedy) / len(greedy) <= 0.45
    sampled = pass_rates(EXAMPLE / "model", held_out[:48], samples=16)
    assert 0.25 <= sum(sampled) / len(sampled) <= 0.50
    assert sum(rate > 0 for rate in sampled) / len(sampled) >= 0.7


def test_the_model_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in EXAMPLE.rglob("*.*") if "__pycache__" not in file.parts) < 3e6


@pytest.mark.slow
def test_the_script_makes_such_a_model(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py"), "--out", str(tmp_path)], check=True)
    for name in ("train.jsonl", "validation.jsonl", "model/tokenizer.json", "model/tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()
    greedy = pass_rates(tmp_path / "model", rows("validation.jsonl"), samples=1)
    assert 0.30 <= sum(greedy) / len(greedy) <= 0.45
