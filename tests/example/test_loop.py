"""examples/loop.py makes, call by call, what the orchestrated job makes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples import loop as example
from functions.exchange.base import checksum
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import load_job
from orchestrator.job.data import Cursor
from orchestrator.job.prompts import Draw, PromptSource
from orchestrator.run.directory import RunDirectory
from orchestrator.run.journal import Journal
from orchestrator.run.versions import digests
from tests.support.tiny_job import command

JOB = example.EXAMPLE / "job.toml"
OVERRIDES = ["deterministic=true", "steps=2", "validation.every=0"]


def seed_of(seed: int, step: int) -> int:
    """As orchestrator/step/context.py derives it."""
    return int(checksum(f"{seed}/{step}/gen".encode())[:16], 16) >> 1


def test_the_loop_trains_the_weights_of_the_orchestrated_job(tmp_path: Path) -> None:
    """Two steps on the same prompts with the same seeds: weights and optimizer state are the same to the bit."""
    done = command("run", JOB, *OVERRIDES, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    job, run = load_job(JOB, OVERRIDES), RunDirectory.open(tmp_path / "run")
    records = asyncio.run(Journal.open(AsyncExchange(run.open_exchange(job)))).records
    orchestrated = [record.history["weights"]["actor"] for record in records]

    prompts = Draw(PromptSource.load(job), Cursor.start(job.seed), job.data.prompts_per_step)
    loop = example.Loop(tmp_path)
    assert (job.data.prompts_per_step, job.rollout.n) == (example.PROMPTS, example.N)

    def digest() -> str:
        return asyncio.run(digests(AsyncExchange(loop.exchange), {"actor": loop.policy}))["actor"]

    found = [digest()]
    for number in (1, 2):
        loop.step(number, prompts.next().rows, seed=seed_of(job.seed, number))
        found.append(digest())
    assert found == orchestrated
    assert len(set(found)) == 3, "each step has trained"


def test_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    example.main(1)
    before, step, after = capsys.readouterr().out.splitlines()
    assert before == "pass rate 0.344 of 256 held-out prompts", "as transformers alone says (test_arithmetic.py)"
    assert step.startswith("step  1  reward 0.")
    assert step.endswith("version 1")
    assert after.startswith("pass rate ")
