"""The one place that waits, in virtual time: what it tells, how long it waits, and what it does not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orchestrator.base.errors import Away, RunError
from orchestrator.base.outages import LONG_S, MAX_S, Outages
from orchestrator.platforms.base import Replica
from orchestrator.session.recorder import ROOM_S, no_room
from orchestrator.simulation.clock import run


class Store:
    """Away from its opening until `until_s`, in the event loop's seconds; `asked` when."""

    def __init__(self, until_s: float, what: str = "s3://bucket") -> None:
        self.until_s, self.what, self.asked = until_s, what, list[float]()

    async def get(self) -> str:
        now_s = asyncio.get_running_loop().time()
        self.asked.append(now_s)
        if now_s < self.until_s:
            raise Away(self.what, f"k: {self.what} does not answer")
        return "value"


def test_many_wait_for_one_store_and_it_is_told_once() -> None:
    notes: list[str] = []
    stores = [Store(600.0) for _ in range(5)]

    async def test() -> None:
        outages = Outages(1800.0, note=notes.append)
        waiting = [asyncio.create_task(outages.bridge(store.get)) for store in stores]
        await asyncio.sleep(12.25)
        assert outages.line() == "waiting for s3://bucket since 12 s"
        assert outages.long
        assert await asyncio.gather(*waiting) == ["value"] * 5
        assert outages.line() == ""
        assert not outages.long

    run(test())
    assert len(notes) == 2
    assert notes[0] == "waiting for s3://bucket, for up to 1800 s (limits.outage_s): k: s3://bucket does not answer"
    assert notes[1].startswith("s3://bucket is back after 6")
    for store in stores:
        pauses = [b - a for a, b in zip(store.asked, store.asked[1:], strict=False)]
        assert max(pauses) <= MAX_S
        assert pauses[-2] >= MAX_S / 2
        assert pauses[0] <= 0.25
    assert len({tuple(store.asked) for store in stores}) == 5  # jitter: they do not come back all at once


def test_an_outage_without_end_is_one_line_after_its_limit() -> None:
    store = Store(1e9)

    async def test() -> None:
        outages = Outages(100.0)
        with pytest.raises(RunError, match=r"does not answer; waited 100 s \(limits\.outage_s\); .*resume") as caught:
            await outages.bridge(store.get)
        assert not isinstance(caught.value, Away)
        assert asyncio.get_running_loop().time() == pytest.approx(100.0)
        assert outages.line() == ""

    run(test())
    assert store.asked[-1] == pytest.approx(100.0)  # a last look at the very end


def test_what_is_wrong_fails_at_once() -> None:
    async def wrong() -> None:
        raise RunError("no such bucket")

    async def test() -> None:
        with pytest.raises(RunError, match=r"^no such bucket$"):
            await Outages().bridge(wrong)
        assert asyncio.get_running_loop().time() == 0.0

    run(test())


def test_two_things_are_away_at_one_time() -> None:
    notes: list[str] = []

    async def test() -> None:
        outages = Outages(note=notes.append)
        s3, redis = Store(50.0, "s3"), Store(100.0, "redis")

        async def both() -> str:
            return await s3.get() + await redis.get()

        assert await outages.bridge(both) == "valuevalue"

    run(test())
    assert [note.split(",")[0].split(" after")[0] for note in notes] == [
        "waiting for s3", "s3 is back", "waiting for redis", "redis is back",
    ]  # fmt: skip


def test_only_a_long_one_costs_replicas() -> None:
    """`changed` is called when it has become long, and when it is over."""
    heard: list[tuple[float, bool]] = []

    async def test(until_s: float) -> None:
        outages = Outages()

        async def changed() -> None:
            heard.append((asyncio.get_running_loop().time(), outages.long))

        outages.changed = changed
        await outages.bridge(Store(until_s).get)

    run(test(LONG_S / 4))
    assert not any(long for _, long in heard)
    heard.clear()
    run(test(60.0))
    assert [long for _, long in heard] == [True, False]
    assert LONG_S <= heard[0][0] < 60.0


def test_one_who_is_cancelled_waits_no_more() -> None:
    notes: list[str] = []

    async def test() -> None:
        outages = Outages(note=notes.append)
        waiting = asyncio.create_task(outages.bridge(Store(1e9).get))
        await asyncio.sleep(3.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert outages.line() == ""

    run(test())
    assert len(notes) == 1  # nobody knows that it is back


def test_a_call_probes_before_it_goes_on() -> None:
    """Of one wait: the first pause, and then as long as the probe finds it away."""
    store = Store(40.0)

    async def test() -> None:
        async def probe() -> None:
            await store.get()

        async with Outages().waiting() as wait:
            work: Callable[[], Awaitable[None]] = probe
            await wait.until(Away("s3://bucket", "said by a function"), work)
            assert asyncio.get_running_loop().time() >= 40.0

    run(test())
    assert store.asked[0] > 0.0


GATED = (("g0", 9.0), ("g1", 4.0))


def test_replicas_without_room_are_told_by_the_one_that_has_waited_longest() -> None:
    busy = Replica("train", "t", "busy", 0.0)
    waiting = [Replica("generate", name, "starting", since_s, f"{name} has no node") for name, since_s in GATED]
    assert no_room([busy], 100.0) == ""
    assert no_room([busy, *waiting], 4.0 + ROOM_S - 0.1) == "", "a node that is about to be free is no news"
    assert no_room([busy, *waiting], 16.0) == "waiting for capacity since 12 s: g1 has no node"
