"""Calls whose function cannot reach the store, or finds an input gone; with a real Redis, stopped and started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from functions.base.wire import Call, Event, Ref
from functions.exchange.base import checksum
from functions.exchange.open import open_exchange
from orchestrator.base.errors import CallFailed, ValueLost
from orchestrator.base.outages import Outages
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet
from orchestrator.calls.invoke import Invoker, RetryPolicy
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform
from orchestrator.step.dataflow import last
from tests.exchange.servers import RedisServer

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"
ONCE = RetryPolicy(attempts=1)


def reads(key: str, value: bytes = b"value") -> Call:
    return Call("c", "work", inputs={"samples": [Ref(key, len(value), checksum(value))]})


def test_a_call_waits_for_the_store_without_a_replica_and_without_an_attempt(
    tmp_path: Path, redis: RedisServer
) -> None:
    notes: list[str] = []
    exchange = open_exchange(redis.url, "job")
    exchange.put("inputs/x", b"value")
    outages = Outages(note=notes.append)
    store = AsyncExchange(exchange, outages=outages)

    async def probe() -> None:
        await store.reachable()
        await asyncio.to_thread(exchange.put, "inputs/x", b"value")  # it has come back with nothing in it

    async def work(platform: LocalPlatform) -> Event:
        invoker = Invoker(platform, retry=ONCE, outages=outages, probe=probe)
        fleet = Fleet(platform, invoker)
        await fleet.keep(["f"], lambda _name: 2)
        async with fleet.stage("f", 2) as stage:
            assert (await last(stage.call(reads("inputs/x")))).kind == "done"
            await asyncio.to_thread(redis.stop)
            second = asyncio.create_task(last(stage.call(Call("d", "work", inputs=reads("inputs/x").inputs))))
            while not notes or platform.replicas():  # kept ones too
                await asyncio.sleep(0.01)
            assert not second.done()
            await asyncio.to_thread(redis.start)
            return await second

    async def test() -> None:
        platform = LocalPlatform(redis.url, "job", log_dir=tmp_path / "logs")
        try:
            await platform.deploy([FunctionSpec("f", f"{FUNCTIONS}:Speaks", max_replicas=2)])
            assert (await work(platform)).kind == "done"
        finally:
            await platform.close()

    asyncio.run(asyncio.wait_for(test(), 250))
    assert notes[0].startswith(f"waiting for Redis redis://127.0.0.1:{redis.port}")
    assert "f, call d" in notes[0]


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("batches/s000001/x", ValueLost),
        ("weights/actor/v000002.c/node-00001.x", ValueLost),
        ("weights/actor/v000002.c/shard-00001.x", CallFailed),
    ],
)
def test_an_input_that_is_gone_is_told_with_its_key(tmp_path: Path, key: str, kind: type[Exception]) -> None:
    """What a step has made can be made again, as can what a node held; anything else is tried again, and then fails."""

    async def test() -> None:
        platform = LocalPlatform(str(tmp_path / "exchange"), "job", log_dir=tmp_path / "logs")
        try:
            await platform.deploy([FunctionSpec("f", f"{FUNCTIONS}:Speaks")])
            await platform.scale("f", 1)
            with pytest.raises(kind, match=key) as caught:
                async for _ in Invoker(platform, retry=ONCE).invoke("f", reads(key)):
                    pass
            assert getattr(caught.value, "key", key) == key
        finally:
            await platform.close()

    asyncio.run(asyncio.wait_for(test(), 250))
