"""A step whose tail goes on at a function of its own: the same job, whatever is killed in mid-tail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.views.trace import TraceFile
from orchestrator.job.config import load_job
from orchestrator.planner.base import TAIL, Planner
from orchestrator.run.directory import RunDirectory
from orchestrator.session.history import finished_steps
from orchestrator.session.session import Run, execute, prepare
from orchestrator.session.view import View
from tests.support import tail_function
from tests.support.processes import who_logs_to
from tests.support.tiny_job import MARK, Background, Job, assert_same, command
from tests.support.waiting import eventually

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(600)]

LONG = [
    "steps=2",
    "model.dtype=bfloat16",
    "validation.every=0",
    "rollout.n=16",
    "rollout.max_response_length=24",
    "rollout.slots=8",
]
"""Three cohorts after another in each replica, so that a cut finds most samples unfinished, and many begun."""
WIDE = [
    "planner.policy=adaptive", "planner.gpu=L40S", "functions.generate.gpus=1", f"functions.{TAIL}.gpus=1",
    f"functions.{TAIL}.usd_per_hour=3600", "functions.generate.usd_per_hour=3600",
]  # fmt: skip


@pytest.fixture(scope="module")
def uncut(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job without a tail function."""
    run = tmp_path_factory.mktemp("runs") / "uncut"
    done = command("run", job.file, "--run-dir", run, *LONG)
    assert done.returncode == 0, done.stderr
    return run


def steps(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("critic/groups")]


def moved(run: Path) -> float:
    """Tokens whose keys and values went with cuts. (A replica that is cut between two cohorts has none.)"""
    return sum(float(line["rollout/moved_tokens"]) for line in steps(run))


def tail_has_begun(run: Path) -> bool:
    """A tail call of the first step has handed over samples."""
    return any((run / "calls").glob(f"s000001.{TAIL}.*/events/*"))


def in_this_process(
    job: Job, run: Path, monkeypatch: pytest.MonkeyPatch, planner: Planner, *, kill: bool = False
) -> None:
    """The job to its end; `kill`: its first replica of generate-tail dies when it has handed over samples."""

    async def killer() -> None:
        await eventually(lambda: tail_has_begun(run))
        (pid,) = who_logs_to(run / "logs" / f"{TAIL}-0.log")
        os.kill(pid, signal.SIGKILL)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            if kill:
                tasks.create_task(killer())
            prepared = prepare(load_job(job.file, [*LONG, *WIDE]))
            await execute(Run(prepared, RunDirectory.create(run, prepared.job), planner), View())

    for variable in (MARK, "OMP_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false"):
        monkeypatch.setenv(*variable.split("="))
    asyncio.run(main())


def test_a_tail_on_its_own_function_is_the_same_job(
    job: Job, uncut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    in_this_process(job, run, monkeypatch, tail_function.CutsAtOnce())
    assert_same(run, uncut)
    migrated = [line["rollout/migrated"] for line in steps(run)]
    assert len(migrated) == 2
    assert all(0 < count < 48 for count in migrated)
    assert moved(run) > 0
    assert list((run / "caches").glob("**/g*")) == []

    functions = TraceFile(run / "trace.json").read().functions
    tails = [work for work in functions[TAIL].work if work.operation == "generate"]
    assert len(tails) == 2  # one call a step
    for tail in tails:
        earlier = [life for life in functions["generate"].lives if life.start_s < tail.start_s]
        assert earlier
        assert all(life.draining_s <= tail.start_s for life in earlier), "replicas of generate outlive the cut"

    prepared = prepare(load_job(job.file, [*LONG, *WIDE]))
    for step in finished_steps(RunDirectory.open(run), prepared.source):  # what a planner would learn from
        (call,) = [call for call in step.calls if call.function == TAIL]
        assert call.stats["decode_steps"] > 0
        assert call.cold
        assert len([call for call in step.calls if call.function == "generate"]) == 2

    books = json.loads((run / "cost.json").read_text())
    paid = books["functions"][TAIL]
    assert paid["starts"] == 2
    assert paid["replica_s"] > 0
    assert paid["usd"] == pytest.approx(paid["replica_s"])
    assert [step["functions"][TAIL]["starts"] for step in books["steps"][1:]] == [1, 1]
    plans = [json.loads(line) for line in (run / "plans.jsonl").read_text().splitlines()]
    assert {plan["tail"] for plan in plans} == {TAIL}


def test_replicas_for_a_tail_that_does_not_come_go_with_generation(
    job: Job, uncut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    in_this_process(job, run, monkeypatch, tail_function.NeverCuts())
    assert_same(run, uncut)
    functions = TraceFile(run / "trace.json").read().functions
    lives, training = functions[TAIL].lives, functions["train"].work
    assert not functions[TAIL].work
    assert len(lives) == len(training) == 2
    for life, trained in zip(lives, training, strict=True):
        assert life.draining_s < trained.start_s, "a replica that nobody needs is paid for while others work"
    stayed = functions["generate"].lives
    assert len(stayed) == 2, "those of the first step are the second's"
    assert all(life.draining_s < training[-1].start_s for life in stayed), "no step follows that they could stay for"


def test_the_tails_replica_dies_in_mid_tail(
    job: Job, uncut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    in_this_process(job, run, monkeypatch, tail_function.CutsAtOnce(), kill=True)
    assert_same(run, uncut)
    assert moved(run) > 0
    assert list((run / "caches").glob("**/g*")) == []
    assert json.loads((run / "cost.json").read_text())["functions"][TAIL]["starts"] == 3


@pytest.mark.slow
def test_the_orchestrator_dies_in_mid_tail(job: Job, uncut: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    orchestrator = Background("run", run, job.file, *LONG, *WIDE, main=tail_function.main)
    orchestrator.wait_for(lambda: tail_has_begun(run))
    begun = sorted(path.name for path in (run / "calls").glob(f"s000001.{TAIL}.*"))
    assert not (run / "journal" / "000001.json").exists()
    orchestrator.kill()
    again = Background("resume", run, main=tail_function.main)
    again.wait_for(lambda: (run / "journal" / "000001.json").exists() or len(begun) != len(tail_calls(run)))
    assert tail_calls(run) in (begun, []), "the resumed step made other calls for the same tail"
    output, _ = again.process.communicate(timeout=500)
    assert again.process.returncode == 0, output
    assert_same(run, uncut)


def tail_calls(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "calls").glob(f"s000001.{TAIL}.*"))
