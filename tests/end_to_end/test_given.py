"""A job that learns from given pairs: what is wrong with its data is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.base.errors import DataError
from orchestrator.job.config import load_job
from orchestrator.session.session import prepare
from tests.support.tiny_job import command, history, make_job


def given(directory: Path, **columns: object) -> Path:
    job = make_job(directory)
    rows = [json.loads(line) | columns for line in (directory / "train.jsonl").read_text().splitlines()]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return job.file


def test_a_dpo_job_trains_and_publishes(tmp_path: Path) -> None:
    file = given(tmp_path, chosen="12", rejected=[{"role": "assistant", "content": "3"}])
    done = command("run", file, "--run-dir", tmp_path / "run", "recipe=dpo", "steps=2", "validation.every=0")
    assert done.returncode == 0, done.stderr
    metrics = [record["history"]["metrics"] for record in history(tmp_path / "run")][1:]
    assert metrics[0]["dpo/loss"] == pytest.approx(0.6931472, abs=1e-5), "the policy is its reference"
    assert metrics[1]["dpo/margin"] > 0
    assert metrics[0]["response_length/mean"] == pytest.approx(2.5), "with the end of sequence"
    assert (tmp_path / "run" / "model" / "config.json").exists()
    books = json.loads((tmp_path / "run" / "cost.json").read_text())["functions"]
    assert not books.get("generate", {"replica_s": 0})["replica_s"], "nothing was generated"


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"chosen": "1"}, r"train.jsonl:1: rejected is None, wants a text, or one message of the assistant"),
        ({"chosen": 1, "rejected": "2"}, r"train.jsonl:1: chosen is 1, wants a text"),
        ({"chosen": "1", "rejected": "123456789"}, r"rejected has 10 tokens, rollout.max_response_length is 8"),
    ],
)
def test_rows_that_give_no_pair_are_named(tmp_path: Path, columns: dict[str, object], line: str) -> None:
    with pytest.raises(DataError, match=line):
        prepare(load_job(given(tmp_path, **columns), ["recipe=dpo"]))
