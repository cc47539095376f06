"""wandb and MLflow by their own clients, offline, read back by them; and whatever they do, the job goes on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.telemetry.background import Background
from orchestrator.telemetry.open_sinks import check_sinks, open_sinks
from orchestrator.telemetry.sinks import Committed, Metrics, Sink
from tests.support.waiting import until

STEPS: Committed = [
    (step, {"training/global_step": float(step), "critic/score/mean": step / 10, "val-core/sums/acc/mean@1": 0.5})
    for step in range(4)
]
JOB = {
    "name": "sums", "steps": 3, "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "train": {"lr": 0.5},
    "exchange": {"url": "redis://user:hunter2@host:6379/0"},
    "reward": {"score": "https://scorer/?api_key=s3cr3t"},
}  # fmt: skip


def job(**telemetry: Any) -> JobConfig:
    return parse_job(JOB | {"telemetry": {"tensorboard": False, **telemetry}}, base=Path("/"))


def executions(config: JobConfig, directory: Path, *, failed: bool = False) -> list[str]:
    """Two: the first is killed after it has committed step 2 and told of steps 0 and 1. What was noted."""
    notes: list[str] = []

    async def first() -> None:
        sinks = open_sinks(config, directory, [], notes.append, end_s=200)
        for sink in sinks:
            for step, metrics in STEPS[:2]:
                sink.write(step, metrics)
        for sink in sinks:
            sink.close(failed=True)

    async def second() -> None:
        sinks = open_sinks(config, directory, STEPS[:3], notes.append, end_s=200)
        for sink in sinks:
            sink.write(*STEPS[3])
            sink.close(failed=failed)

    asyncio.run(first())
    ended = time.ctime()
    until(lambda: time.ctime() != ended)  # wandb calls its directories by the second
    asyncio.run(second())
    return notes


def test_wandb_has_every_step_of_all_executions_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the client wandb is not installed (extra wandb)")
    assert executions(job(wandb={"project": "rlhf", "entity": "us", "mode": "offline"}), tmp_path) == []
    until(lambda: len(read_wandb(tmp_path)[2]) == 2)  # its own process writes the file, and may be behind
    runs, points, exits = read_wandb(tmp_path)
    assert runs == {((tmp_path / "run-id").read_text(), "rlhf", "us", "sums")}
    assert points == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert exits == [1, 0]


def read_wandb(directory: Path) -> tuple[set[tuple[str, ...]], list[tuple[int, float]], list[int]]:
    """Runs, points and exit codes of all files of offline runs."""
    runs, points, exits = set[tuple[str, ...]](), list[tuple[int, float]](), list[int]()
    for file in sorted((directory / "wandb").glob("offline-run-*/run-*.wandb")):
        assert b"hunter2" not in file.read_bytes()
        assert b"s3cr3t" not in file.read_bytes()
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.add((record.run.run_id, record.run.project, record.run.entity, record.run.display_name))
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert config["train"]["lr"] == 0.5
            elif kind == "history":
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                assert row["val-core/sums/acc/mean@1"] == 0.5
                points.append((record.history.step.num, row["critic/score/mean"]))
            elif kind == "exit":
                exits.append(record.exit.exit_code)
    return runs, points, exits


def wandb_records(file: Path) -> list[Any]:
    """A .wandb file is a LevelDB log after a header of 7 bytes: blocks of 32 KiB, in them pieces of records, each with
    checksum (4 bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last)."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts, found = file.read_bytes(), 7, b"", []
    assert data[:4] in (b":W&B", b"")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record: Any = vars(wandb_internal_pb2)["Record"].FromString(parts)
            found.append(record)
            parts = b""
    return found


@pytest.mark.parametrize("failed", [False, True])
def test_mlflow_has_every_step_of_all_executions_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the client mlflow is not installed (extra mlflow)")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database wants SQLAlchemy, which nothing else here does
    uri = f"file://{tmp_path}/mlruns"
    assert executions(job(mlflow={"tracking_uri": uri, "experiment": "e"}), tmp_path, failed=failed) == []
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status) == ("sums", "FAILED" if failed else "FINISHED")
    assert run.data.params["train.lr"] == "0.5"
    assert not [key for key, value in run.data.params.items() if "hunter2" in value or "s3cr3t" in value]
    points = [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "critic/score/mean")]
    assert sorted(points) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert run.data.metrics["val-core/sums/acc/mean_at_1"] == 0.5


class Odd:
    """A sink that does what it is told to."""

    def __init__(self, on_write: Callable[[], object]) -> None:
        self.on_write, self.written, self.closed = on_write, list[int](), list[bool]()

    def write(self, step: int, metrics: Metrics) -> None:
        self.on_write()
        self.written.append(step)

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


def through(open: Callable[[], Sink], *, end_s: float = 200) -> list[str]:
    notes: list[str] = []

    async def main() -> None:
        sink = Background("odd", open, notes.append, end_s=end_s)
        for step, metrics in STEPS:
            sink.write(step, metrics)
        sink.close(failed=True)

    asyncio.run(main())
    return notes


def test_in_order_and_to_the_end() -> None:
    odd = Odd(lambda: None)
    assert through(lambda: odd) == []
    assert (odd.written, odd.closed) == ([0, 1, 2, 3], [True])


def test_one_that_hangs_is_left_behind() -> None:
    forever = threading.Event()
    assert through(lambda: Odd(forever.wait), end_s=0.05) == [
        "odd: has not finished 0.05 s after the job's end; what it lacks is lost to it"
    ]
    forever.set()


def raising(error: BaseException) -> Callable[[], Sink]:
    def fail() -> None:
        raise error

    return lambda: Odd(fail)


@pytest.mark.parametrize("error", [OSError("no way\nto host"), SystemExit(1), KeyError("x")])
def test_one_that_fails_is_told_once_in_one_line(error: BaseException) -> None:
    [note] = through(raising(error))
    assert note.startswith("odd: ")
    assert note.endswith("; the job goes on without it")
    assert "\n" not in note


def test_a_client_that_is_not_installed_is_told_before_the_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=r"telemetry.wandb: wants its client: pip install 'rlhf-orchestrate\[wandb\]'"
    ):
        check_sinks(job(wandb={"project": "p"}))
    check_sinks(job())
