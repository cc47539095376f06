"""A gang on the local platform: the fleet starts its ranks, one is killed, all are tried again."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Version
from functions.exchange.base import Exchange
from functions.exchange.open import open_exchange
from functions.weights.base import import_model
from functions.weights.manifest import read_manifest
from orchestrator.base.errors import CallFailed
from orchestrator.calls.fleet import Fleet
from orchestrator.calls.invoke import Invoker, RetryPolicy
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform
from tests.support.tiny_job import make_model

SIZE = 2


def train_call(exchange: Exchange, directory: Path) -> Call:
    """A GRPO step over 64 samples of random tokens, with a call's inputs in the exchange."""
    make_model(directory)
    rng = np.random.default_rng(0)
    base = SampleBatch.of_prompts(rng.integers(2, 15, (16, 4)).tolist(), samples_per_prompt=4, version=0)
    lengths = np.full(64, 24, np.int32)
    total = int(lengths.sum())
    samples = SampleBatch(
        prompts=base.prompts, prompt=base.prompt, group=base.group, index=base.index,
        responses=Ragged(rng.integers(2, 15, total).astype(np.int32), lengths),
        logprobs=np.full(total, -2.5, np.float32), mask=np.ones(total, np.float32),
        finish=np.full(64, Finish.STOP, np.int32), version=base.version,
    )  # fmt: skip
    scores = Columns.of(samples, sample={"score": rng.random(64).astype(np.float32)})
    inputs = {
        "samples": [exchange.put("batches/samples", samples.encode())],
        "columns": [exchange.put("batches/scores", scores.encode())],
    }
    params = {
        "micro_batch_tokens": 64,
        "optimizer": {"lr": 1e-3},
        "max_rollout_logprob_diff": "off",
    }  # nobody sampled them
    return Call("s000000.train.1", "train", inputs, {"policy": import_model(exchange, "policy", directory)}, params)


def attempts(exchange: Exchange, call: Call) -> set[str]:
    return {key.split("/")[2] for key in exchange.list(f"gang/{call.id}/")}


@pytest.mark.timeout(300)
def test_fatal_killed_and_repeated_gangs(tmp_path: Path) -> None:
    exchange = open_exchange(str(tmp_path / "exchange"), "job")
    call = train_call(exchange, tmp_path / "model")
    broken = replace(call, id="broken", inputs={"samples": call.inputs["samples"]})
    notes: list[str] = []

    async def run() -> tuple[Event, Event]:
        platform = LocalPlatform(str(tmp_path / "exchange"), "job", log_dir=tmp_path / "logs")
        try:
            await platform.deploy([FunctionSpec("train", "train", {"device": "cpu"}, max_replicas=SIZE)])
            invoker = Invoker(platform, retry=RetryPolicy(base_s=0.05), note=notes.append)
            async with Fleet(platform, invoker).stage("train", SIZE) as stage:
                with pytest.raises(CallFailed, match="sample column 'score' is missing"):
                    await stage.gang(broken)
                assert notes == []  # what is fatal is not tried again
                first = asyncio.create_task(stage.gang(call))
                while not attempts(exchange, call) or [r.state for r in platform.replicas()] != ["busy"] * SIZE:
                    await asyncio.sleep(0.005)
                os.kill(platform.processes()["train"][-1], signal.SIGKILL)
                done = await first
                assert len(attempts(exchange, call)) == 2
                again = await stage.gang(call)
                assert len(stage.observations) == 2 * SIZE  # of the two attempts that were whole
                return done, again
        finally:
            await platform.close()

    done, again = asyncio.run(run())
    assert len(notes) == 1
    assert "SIGKILL" in notes[0]
    assert done.data["stats"]["ranks"] == SIZE
    version = Version.from_json(done.data["version"])
    assert read_manifest(exchange, version).parent == Version("policy", 0)
    assert again.data == done.data
    assert len(attempts(exchange, call)) == 2  # nobody met: the version was there
