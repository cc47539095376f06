"""What tests of gangs share: a ragged batch in an exchange, and what one process alone makes of a call on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Json, Version
from functions.call.function import Context
from functions.exchange.directory import DirectoryExchange
from functions.train.function import TrainFunction
from functions.weights.manifest import Manifest, read_manifest
from functions.weights.store import fetch
from tests.support.versions import fetch_state

GROUPS, N = 5, 3


@dataclass(frozen=True)
class GangBench:
    exchange: DirectoryExchange
    root: Path
    scratch: Path
    inputs: Json

    def alone(self, call: Call) -> Json:
        (event,) = TrainFunction(device="cpu").call(call, Context(self.exchange, str(self.scratch / "alone")))
        return dict(event.data)

    def manifest(self, data: Json) -> Manifest:
        return read_manifest(self.exchange, Version.from_json(data["version"]))

    def tensors(self, data: Json) -> dict[str, Tensor]:
        version = Version.from_json(data["version"])
        weights, state = fetch(self.exchange, version), fetch_state(self.exchange, version)
        return weights | {f"state/{name}": tensor for name, tensor in state.items()}


def ragged_batch(exchange: DirectoryExchange, vocabulary: int, longest: int) -> tuple[SampleBatch, Json]:
    """GROUPS prompts with N responses of up to `longest` tokens each; and the inputs of a train call on them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocabulary, k).tolist() for k in (3, 1, 5, 2, 4)]
    base = SampleBatch.of_prompts(prompts, samples_per_prompt=N, version=0)
    lengths = rng.integers(1, longest + 1, GROUPS * N).astype(np.int32)
    total = int(lengths.sum())
    samples = replace(
        base,
        responses=Ragged(rng.integers(3, vocabulary, total).astype(np.int32), lengths),
        logprobs=np.log(rng.uniform(0.05, 0.5, total)).astype(np.float32),
        mask=(rng.random(total) > 0.2).astype(np.float32),
        finish=np.full(GROUPS * N, Finish.STOP, np.int32),
    )
    token = {name: rng.normal(-2, 0.5, total).astype(np.float32) for name in ("ref_logprobs", "values")}
    columns = Columns.of(samples, sample={"score": rng.random(GROUPS * N).astype(np.float32)}, token=token)
    inputs = {
        "samples": [exchange.put("batches/s", samples.encode())],
        "columns": [exchange.put("batches/c", columns.encode())],
    }
    return samples, inputs
