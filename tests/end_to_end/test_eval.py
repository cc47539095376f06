"""The best version is the job's model, a job that gets no better ends; `eval` of a run, over several sets."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from orchestrator.base.errors import ConfigError, RunError
from orchestrator.job.config import parse_job
from orchestrator.job.prompts import PromptSet
from orchestrator.run.journal import Record
from orchestrator.session.scores import best_of, best_record, check_metric, majority_metrics, stopped_early
from tests.support.tiny_job import command, make_job

METRIC = "val-core/sums/acc/mean@1"


def test_the_best_version_is_kept_and_evaluated(tmp_path: Path) -> None:
    """A learning rate that changes nothing: the first validation stays the best, and one worse ends the job."""
    job = make_job(tmp_path, steps=5)
    given = ["train.lr=1e-12", "validation.every=1", "validation.patience=1", f"checkpoints.best={METRIC}"]
    run = tmp_path / "run"
    done = command("run", job.file, "--run-dir", run, "checkpoints.keep=1", *given)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2, "stopped after the first validation that was no better"
    assert "no better in 1 validations" in (run / "events.jsonl").read_text()
    other = tmp_path / "other.jsonl"
    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    other.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "data_source"}) + "\n" for row in rows))
    place = tmp_path / "eval"
    done = command("eval", run, "--data", tmp_path / "validation.jsonl", "--data", other, "--json", "--run-dir", place)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["metrics"][METRIC] == pytest.approx(metrics[0][METRIC])
    assert result["metrics"]["val-core/other/acc/mean@1"] == pytest.approx(metrics[0][METRIC])
    assert result["replica_s"] > 0
    assert len((place / "samples" / "000000.jsonl").read_text().splitlines()) == 2 * len(rows)
    assert not (place / "model").exists()
    books = json.loads((place / "cost.json").read_text())
    assert "train" not in json.dumps([books["functions"]]) or not books["functions"]["train"]["replica_s"]


def test_best_of_is_the_mean_over_all_choices() -> None:
    values = [0.0, 1.0, 0.5, 0.0, 2.0]
    for k in range(1, 6):
        every = [max(chosen) for chosen in combinations(values, k)]
        assert best_of(values, k) == pytest.approx(sum(every) / len(every))


def test_the_majority_answers() -> None:
    prompts = PromptSet([[1], [2]], [{"data_source": "a"}, {"data_source": "a"}])

    def text(group: int, index: int, pred: str, score: float | None) -> dict[str, Any]:
        return {"group": group, "index": index, "pred": pred, "score": score, "response": f"it is {pred}"}

    texts = [text(0, 2, "4", 1.0), text(0, 0, "5", 0.0), text(0, 1, "4", 1.0)]
    texts += [text(1, 0, "7", 0.0), text(1, 1, "8", 1.0), text(1, 2, "9", None)]
    assert majority_metrics(prompts, texts, 3) == {"val-core/a/acc/maj@3/mean": 0.5}


def records(*values: float | None) -> list[Record]:
    return [
        Record(step, "", {"metrics": {} if value is None else {METRIC: value}}, {}, {})
        for step, value in enumerate(values)
    ]


def test_the_first_of_the_highest_is_best_and_patience_counts_validations() -> None:
    seen = records(0.1, None, 0.4, None, 0.4, 0.3)
    found = best_record(seen, METRIC)
    assert found is not None
    assert found.step == 2
    assert best_record(records(None), METRIC) is None
    assert [stopped_early(seen[:n], METRIC, 2) for n in range(1, 7)] == [False] * 5 + [True]
    assert not stopped_early(records(0.1, 0.2, 0.3), METRIC, 1)
    with pytest.raises(RunError, match="no metric 'acc' in this job's validation; it has val-core/sums/acc/mean@1"):
        check_metric({METRIC: 0.0, "other": 1.0}, "acc")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"checkpoints": {"best": METRIC}}, "checkpoints.best: wants prompts to validate on"),
        ({"validation": {"patience": 2}}, "validation.patience: wants checkpoints.best"),
        ({"steps": 0}, "steps: 0 steps only validate"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    table = {"name": "j", "steps": 2, "model": {"path": "m"}, "data": {"train": "t.jsonl"}} | changes
    with pytest.raises(ConfigError, match=line):
        parse_job(table, base=tmp_path)


def test_a_run_is_named_where_a_model_may_be(tmp_path: Path) -> None:
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    (tmp_path / "runs" / "sft" / "run.json").write_text("{}")
    table = {"name": "j", "steps": 2, "model": {"path": "runs/sft"}, "data": {"train": "t.jsonl"}}
    assert parse_job(table, base=tmp_path).model.path == str(tmp_path / "runs" / "sft" / "model")
