"""The simulated platform is one as the others are, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from functions.base.samples import SampleBatch
from functions.base.wire import Call, Version
from orchestrator.planner.latency import GenerateCost
from orchestrator.platforms.base import FunctionSpec
from orchestrator.simulation import clock
from orchestrator.simulation.functions import Generate
from orchestrator.simulation.memory import MemoryExchange
from orchestrator.simulation.platform import SimulatedPlatform
from tests.platforms.conformance import Bench, Conformance


class Endless:
    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        return 10**9


class TestSimulated(Conformance):
    def run(self, test: Coroutine[Any, Any, None]) -> None:
        clock.run(test)

    @asynccontextmanager
    async def bench(self) -> AsyncIterator[Bench]:
        exchange = MemoryExchange(asyncio.get_running_loop().time)
        cost = GenerateCost(call_s=0.0, prefill_token_s=0.01, step_s=1.0, sequence_s=0.0, kv_token_s=0.0)
        platform = SimulatedPlatform(
            {"generate": Generate(cost, Endless(), start_s=10.0, load_s=0.0, delta_s=0.0)}, exchange
        )
        spec = FunctionSpec("generate", "generate", max_replicas=3, gpus=1)
        batch = SampleBatch.of_prompts([[1] * 10], samples_per_prompt=1, version=0)
        samples = exchange.put("batches/samples", batch.encode())

        def call(name: str) -> Call:
            params = {"max_response_length": 10**9, "chunk": 1}
            return Call(name, "generate", {"samples": [samples]}, {"policy": Version("actor", 0)}, params)

        try:
            await platform.deploy([spec])
            yield Bench(platform, spec, call, lambda call: exchange.put(call.cut_key, b"cut"), platform.kill)
        finally:
            await platform.close()
