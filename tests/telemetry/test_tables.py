"""`status RUN` and `cost RUN` from the files of a run directory."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.base.errors import RunError
from orchestrator.commands.cost import books_of, cost_table
from orchestrator.commands.status import print_status, read_metrics
from orchestrator.job.config import load_job
from orchestrator.platforms.base import FunctionSpec, Usage
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ledger import Ledger
from orchestrator.telemetry.sinks import JsonLines

VAL = "val-core/arithmetic/acc/mean@1"
JOB = 'name = "tiny"\nsteps = 3\n[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\nvalidation = "v.jsonl"\n'
SPECS = [
    FunctionSpec("generate", "generate", max_replicas=2, gpus=1, usd_per_hour=36.0),
    FunctionSpec("train", "train", usd_per_hour=36.0),
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "job.toml").write_text(JOB)
    return RunDirectory.create(tmp_path / "run", load_job(tmp_path / "job.toml"))


def console() -> Console:
    return Console(file=io.StringIO(), width=150, record=True)


def status(run: RunDirectory) -> str:
    to = console()
    print_status(run, to)
    return to.export_text()


def test_status_from_start_to_end(run: RunDirectory) -> None:
    text = status(run)
    assert "tiny (grpo)" in text
    assert "- of 3" in text
    assert "rlhf-orchestrate resume" in text
    sink = JsonLines(run.path / "metrics.jsonl", [])
    sink.write(0, {VAL: 0.25})
    sink.write(1, {"critic/score/mean": 0.5, "timing_s/step": 1.25, "rollout/tokens_per_s": 12345.6})
    with run.lock():
        text = status(run)
    assert "running (process " in text
    assert "1 of 3" in text
    assert "12,346" in text
    for step in (2, 3):
        sink.write(step, {"critic/score/mean": 0.75, VAL: 0.875})
    sink.close(failed=False)
    text = status(run)
    assert "finished" in text
    assert "0.250 -> 0.875  ▁██" in text
    last = next(row for row in text.splitlines() if row.split()[:1] == ["3"])
    assert last.split() == ["3", "0.75", "-", "-", "0.875"]


def test_a_line_that_is_being_written_is_left_out_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "rew')
    assert [row["step"] for row in read_metrics(path)] == [0]
    path.write_text('{"step": 0}\n{"reward": 1}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl:2: not a line of metrics"):
        read_metrics(path)


def test_cost(run: RunDirectory) -> None:
    with pytest.raises(RunError, match=r"cost.json: not there yet"):
        books_of(run)
    ledger = Ledger(run.path / "cost.json", SPECS, next_step=0, now_s=0.0)
    ledger.close_step(0, [], 1.0)
    ledger.close_step(1, [Usage("generate", "g0", 1.0, 11.0, 8.0), Usage("train", "t0", 11.0, 16.0, 5.0)], 20.0)
    to = console()
    to.print(cost_table(books_of(run), {"why": "nothing was simulated"}), highlight=False)
    text = to.export_text()
    rows = [row.split() for row in text.splitlines()]
    assert ["generate", "10.0", "8.0", "80%", "10.0", "1", "$0.1000"] in rows
    assert ["train", "5.0", "5.0", "100%", "0.0", "1", "$0.0500"] in rows
    assert ["all", "15.0", "13.0", "87%", "10.0", "2", "$0.1500"] in rows
    assert ["0", "1.0", "0.0", "0.0", "$0.0000"] in rows
    assert ["1", "19.0", "10.0", "5.0", "$0.1500"] in rows
    assert "$0.1500 in 0:20, started once" in text
    assert json.loads((run.path / "cost.json").read_text())["usd"] == pytest.approx(0.15)
