"""Keys and values of a tail that is cut: there while they are wanted, deleted when they are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from functions.base.wire import CACHES, Call
from functions.exchange.directory import DirectoryExchange
from orchestrator.base.errors import CallFailed
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet
from orchestrator.calls.invoke import Invoker, RetryPolicy
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform
from orchestrator.step.dataflow import Samples
from orchestrator.step.rollout import Rollout, Shard, regroup

FUNCTION = Path(__file__).parent / "cut_for_tests.py"
PARAMS = {"fail": False, "die": False}


def blobs(exchange: DirectoryExchange) -> list[str]:
    return exchange.list(CACHES)


async def generation(root: Path, params: dict[str, Any]) -> tuple[list[tuple[int, int]], list[str]]:
    """Two calls of three samples, cut when one of each is finished, the rest in two calls. Returns the finished samples
    and the blobs that were there at the cut; raises what the calls raise."""
    exchange = DirectoryExchange(f"{root}/exchange/job")
    store = AsyncExchange(exchange)
    platform = LocalPlatform(str(root / "exchange"), "job", log_dir=root / "logs")
    made: dict[str, int] = {}

    def call(function: str, shard: Shard) -> Call:
        identity = f"s000001.{function}.{made.setdefault(shard.samples[0].key, len(made))}"
        return Call(identity, "generate", shard.inputs, params=PARAMS | params)

    try:
        await platform.deploy([FunctionSpec("f", f"{FUNCTION}:Cut", max_replicas=2)])
        fleet = Fleet(platform, Invoker(platform, retry=RetryPolicy(attempts=2, base_s=0.01)))
        rollout = Rollout(call, store, f"{CACHES}s000001.", unfinished=6, cut_below=4, migrate_to=1)
        samples = Samples()
        try:
            async with fleet.stage("f", 2) as stage:
                first = [Shard([await store.put(f"batches/{n}", str(n).encode())]) for n in range(2)]
                leftovers = await rollout.run(stage, first, samples)
                there = blobs(exchange)
                await rollout.run(stage, regroup(leftovers, 2), samples)
        finally:
            await rollout.free()
        assert rollout.unfinished == 0
        return sorted(key for item in rollout.finished for key in item.keys), there
    finally:
        await platform.close()


EVERY = [(group, index) for group in range(2) for index in range(3)]


def test_they_are_there_while_they_are_wanted(tmp_path: Path) -> None:
    """Those of other steps stay."""
    exchange = DirectoryExchange(f"{tmp_path}/exchange/job")
    exchange.put(f"{CACHES}s000010.f.0/other", b"")
    finished, there = asyncio.run(generation(tmp_path, {}))
    assert finished == EVERY
    assert len(there) == 4 + 1
    assert blobs(exchange) == [f"{CACHES}s000010.f.0/other"]


def test_whoever_dies_writes_and_finds_them_again(tmp_path: Path) -> None:
    """Each call's replica dies once: those that were cut when they had written, those that go on when they had read."""
    finished, there = asyncio.run(generation(tmp_path, {"die": True}))
    assert finished == EVERY
    exchange = DirectoryExchange(f"{tmp_path}/exchange/job")
    assert len(exchange.list("died/")) == 4
    assert len(there) == 8, "the dead have left theirs"
    assert blobs(exchange) == []


def test_they_go_with_a_step_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(generation(tmp_path, {"fail": True}))
    assert failed.group_contains(CallFailed, match="no more")
    assert blobs(DirectoryExchange(f"{tmp_path}/exchange/job")) == []
