"""vLLM that parks: weights in a mapped file, no keys and values; the same samples, and the next version, afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from functions.base.wire import Version
from functions.generate.engine.base import Sampling
from functions.generate.vllm.engine import VllmEngine
from functions.models.parked import give_back
from tests.support.processes import private_mb
from tests.vllm.samples import Logprobs, random_prompts, requests, run

pytestmark = pytest.mark.vllm

SAMPLING = Sampling(32, seed=4, ignore_eos=True)


def test_a_parked_engine_comes_back_and_takes_the_next_version(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], logprobs: Logprobs
) -> None:
    big = {"vocab_size": 160, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 3}
    models = [make_model(seed, **big) for seed in (30, 31)]
    size_mb = (models[0] / "model.safetensors").stat().st_size / 2**20
    wanted = requests(random_prompts(0, [300, 20]), 2)
    engine = make_engine(kv_cache_mb=64)
    engine.load(Version("policy", 0), models[0])
    before = run(engine, wanted, SAMPLING)
    held = private_mb()
    engine.park(models[0])
    gc.collect()
    give_back()
    assert held - private_mb() > 0.9 * (size_mb + 64)
    engine.unpark()
    again = run(engine, wanted, SAMPLING)
    assert {n: (s.response.tolist(), s.logprobs.tolist()) for n, s in again.items()} == {
        n: (s.response.tolist(), s.logprobs.tolist()) for n, s in before.items()
    }
    engine.park(None)
    engine.unpark()
    engine.load(Version("policy", 1), models[1])
    found = run(engine, wanted, SAMPLING)
    for request in wanted:
        off = abs(logprobs(models[1], request, found[request.number], 1.0).numpy() - found[request.number].logprobs)
        assert off.max() < 1e-4, "a weight or a prefix of the version before"
