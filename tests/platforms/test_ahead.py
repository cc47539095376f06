"""Replicas of the local platform load what their function's hint names, each for itself, before they are called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from functions.base.samples import SampleBatch
from functions.base.wire import Call, Event, Hint, Load, Version, hint_key
from functions.exchange.directory import DirectoryExchange
from functions.weights.base import import_model
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform
from tests.support.processes import exists
from tests.support.tiny_job import make_model
from tests.support.waiting import eventually

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 90))


def said(root: Path, replica: str, message: str) -> bool:
    log = root / "logs" / f"{replica}.log"
    return log.exists() and message in log.read_text()


def hint(exchange: DirectoryExchange, function: str, load: Load) -> None:
    exchange.put(hint_key(function), json.dumps(Hint(1, [load]).to_json()).encode())


async def answer(platform: LocalPlatform, function: str, call: Call) -> list[Event]:
    return [event async for event in platform.call(function, call) if event.kind != "progress"]


@pytest.mark.parametrize(
    "warm_parent", [pytest.param(True, id="warm"), pytest.param(False, id="fresh", marks=pytest.mark.slow)]
)
def test_replicas_started_ahead_have_the_policy_when_they_are_called(tmp_path: Path, warm_parent: bool) -> None:
    make_model(tmp_path / "model")
    exchange = DirectoryExchange(str(tmp_path / "exchange" / "job"))
    policy = import_model(exchange, "actor", tmp_path / "model")
    hint(exchange, "generate", Load("generate", {"policy": policy}))
    samples = exchange.put("in", SampleBatch.of_prompts([[3, 4]], samples_per_prompt=1, version=0).encode())
    calls = [
        Call(name, "generate", {"samples": [samples]}, {"policy": policy}, {"max_response_length": 2}) for name in "ab"
    ]

    async def test() -> None:
        url, logs = str(tmp_path / "exchange"), tmp_path / "logs"
        platform = LocalPlatform(url, "job", log_dir=logs, warm_parent=warm_parent)
        try:
            await platform.deploy([FunctionSpec("generate", "generate", {"engine": "torch"}, max_replicas=2)])
            await platform.scale("generate", 2)
            for replica in ("generate-0", "generate-1"):
                await eventually(partial(said, tmp_path, replica, "policy actor v000000 loaded ahead"))
            exchange.delete(policy.prefix)
            answers = await asyncio.gather(*(answer(platform, "generate", call) for call in calls))
        finally:
            await platform.close()
        assert {events[0].data["replica"] for events in answers} == {"generate-0", "generate-1"}
        for events in answers:
            assert events[-1].kind == "done", events
            assert events[-1].data["loaded_ahead_s"] > 0

    run(test())


def test_to_zero_while_it_loads(tmp_path: Path) -> None:
    hint(DirectoryExchange(str(tmp_path / "exchange" / "job")), "slow", Load("one", {"a": Version("actor", 1)}))

    async def test() -> None:
        platform = LocalPlatform(str(tmp_path / "exchange"), "job", log_dir=tmp_path / "logs", warm_parent=True)
        options = {"until": str(tmp_path / "never")}
        try:
            await platform.deploy([FunctionSpec("slow", f"{FUNCTIONS}:Loads", options)])
            await platform.scale("slow", 1)
            await eventually(lambda: said(tmp_path, "slow-0", "loading one"))
            [replica], [pid] = platform.replicas(), platform.processes()["slow"]
            assert replica.state == "idle", "it is ready, and goes as others do that nobody calls"
            await platform.scale("slow", 0)
            await eventually(lambda: platform.replicas() == [])
            assert not exists(pid)
        finally:
            await platform.close()

    run(test())
