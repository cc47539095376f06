"""invoke over the local platform, with real processes that are killed, stopped, and slow."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functions.base.wire import Call, Event
from functions.exchange.directory import DirectoryExchange
from orchestrator.base.errors import CallFailed
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.invoke import Invoker, RetryPolicy, Timeouts, ask_cut
from orchestrator.planner.base import CallObservation
from orchestrator.platforms.base import FunctionSpec, PlatformError
from orchestrator.platforms.local import LocalPlatform
from tests.support.waiting import eventually

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"
QUICK = RetryPolicy(attempts=3, base_s=0.01)


@asynccontextmanager
async def local(root: Path, kind: str = "Count", replicas: int = 1) -> AsyncIterator[LocalPlatform]:
    platform = LocalPlatform(str(root / "exchange"), "job", log_dir=root / "logs")
    try:
        await platform.deploy([FunctionSpec("f", f"{FUNCTIONS}:{kind}", max_replicas=3)])
        await platform.scale("f", replicas)
        yield platform
    finally:
        await platform.close()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


async def results(invoker: Invoker, call: Call, **more: Any) -> list[Event]:
    """What counts: neither `started` nor heartbeats."""
    return [e async for e in invoker.invoke("f", call, **more) if e.kind not in ("started", "progress")]


def indices(events: list[Event]) -> list[int]:
    return [index for event in events if event.kind in ("samples", "cut") for index in event.data["index"]]


def test_a_call_that_is_killed_again_and_again_gives_each_event_once(tmp_path: Path) -> None:
    """More deaths than attempts in a row are allowed: each attempt that brings something new counts from one again."""
    log = tmp_path / "log"
    params = {"n": 6, "pause_s": 0.05, "log": str(log), "kill_at": [1, 2, 3, 4, 5]}

    async def test() -> None:
        async with local(tmp_path) as platform:
            observed: list[CallObservation] = []
            events = await results(
                Invoker(platform, retry=QUICK), Call("c", "count", params=params), observe=observed.append
            )
            assert [e.kind for e in events] == ["samples"] * 6 + ["done"]
            assert indices(events) == [0, 1, 2, 3, 4, 5]
            [seen] = observed
            assert seen.replica == "f-5"
            assert (seen.samples, seen.response_tokens, seen.prompt_tokens) == (6, 18, 12)

    run(test())
    worked = [int(line.split()[0]) for line in log.read_text().splitlines()]
    assert worked == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_a_replica_that_falls_silent_is_given_up_and_the_call_goes_on_elsewhere(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def test() -> None:
        async with local(tmp_path) as platform:
            invoker = Invoker(platform, retry=QUICK, timeouts=Timeouts(heartbeat_s=5.0))
            call = Call("c", "count", params={"n": 4, "hold": 1, "until": str(gate), "log": str(tmp_path / "log")})
            seen: list[Event] = []
            async for event in invoker.invoke("f", call):
                if event.kind == "samples" and not seen:
                    os.kill(int((tmp_path / "log").read_text().split()[1]), signal.SIGSTOP)
                    gate.touch()
                if event.kind not in ("started", "progress"):
                    seen.append(event)
            assert indices(seen) == [0, 1, 2, 3]
            assert seen[-1].kind == "done"
            await eventually(lambda: [r.name for r in platform.replicas()] == ["f-1"])  # f-0 is being killed

    run(test())


def test_a_fatal_error_fails_the_call_at_once_with_its_place(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path, "Fails") as platform:
            with pytest.raises(CallFailed, match=r"^f, call c7: the loss is nan at step 3$"):
                await results(Invoker(platform), Call("c7", "fatal"))

    run(test())


def test_retryable_errors_and_missed_deadlines_are_tried_again_and_then_fail_the_call(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path, "Fails") as platform:
            with pytest.raises(CallFailed, match=r"^f, call c: failed 3 times, at last: the device is away$"):
                await results(Invoker(platform, retry=QUICK), Call("c", "retryable"))
            late = Call("late", "stubborn", params={"until": "never"}, deadline_s=0.2)
            with pytest.raises(CallFailed, match=r"at last: call late went beyond its deadline of 0\.2 s$"):
                await results(Invoker(platform, retry=RetryPolicy(attempts=2, base_s=0.01)), late)

    run(test())


def test_a_cut_hands_over_the_rest(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            exchange = DirectoryExchange(str(tmp_path / "exchange" / "job"))
            call = Call("c", "count", params={"n": 50, "hold": 1})
            seen: list[Event] = []
            async for event in Invoker(platform).invoke("f", call):
                if event.kind == "samples" and not seen:
                    await ask_cut(AsyncExchange(exchange), call)
                if event.kind not in ("started", "progress"):
                    seen.append(event)
            assert [e.kind for e in seen][-2:] == ["cut", "done"]
            assert indices(seen) == list(range(50))

    run(test())


def test_closing_the_events_frees_the_function(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            invoker = Invoker(platform)
            events = invoker.invoke("f", Call("c", "count", params={"n": 1000, "hold": 2}))
            async for event in events:
                if event.kind == "samples":
                    break
            await events.aclose()
            assert indices(await results(invoker, Call("d", "count", params={"n": 1}))) == [0]

    run(test())


def test_what_is_observed(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            observed: list[CallObservation] = []
            for name in ("c", "d"):
                call = Call(name, "count", params={"n": 2, "pause_s": 0.1})
                await results(Invoker(platform), call, observe=observed.append)
            first, second = observed
            assert (first.function, first.operation, first.replica) == ("f", "count", "f-0")
            assert (first.cold, second.cold) == (True, False)
            assert first.start_s > second.start_s > 0  # the first waited for the process
            assert first.work_s > 0
            assert first.stats["n"] == 2.0

    run(test())


def test_platform_errors_are_not_retried(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            with pytest.raises(PlatformError, match="function 'g' is not deployed"):
                async for _ in Invoker(platform).invoke("g", Call("c", "count")):
                    pass

    run(test())


def test_without_replicas_the_call_fails_after_its_attempts(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path, replicas=0) as platform:
            with pytest.raises(CallFailed, match="failed 3 times, at last: no replica of 'f' is wanted"):
                await results(Invoker(platform, retry=QUICK), Call("c", "count"))

    run(test())


@given(
    failures=st.integers(1, 60),
    dice=st.floats(0, 1),
    base_s=st.floats(0.01, 2),
    factor=st.floats(1, 4),
    jitter=st.floats(0, 1),
)
def test_pauses_grow_to_a_limit_and_never_beyond(
    failures: int, dice: float, base_s: float, factor: float, jitter: float
) -> None:
    policy = RetryPolicy(base_s=base_s, factor=factor, max_s=30.0, jitter=jitter)
    pause_s = policy.pause_s(failures, dice)
    whole_s = policy.pause_s(failures, 0.0)
    assert whole_s * (1 - jitter) * (1 - 1e-12) <= pause_s <= whole_s <= 30.0
    assert whole_s <= policy.pause_s(failures + 1, 0.0)
    assert policy.pause_s(1, 0.0) == pytest.approx(base_s)
