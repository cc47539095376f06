"""What every platform must do. Each platform's tests inherit `Conformance` and say how to open one (`bench`), and in
which time it runs (`run`).

A call works until the test ends it (`Bench.end`): nothing here depends on how long anything takes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import pytest

from functions.base.wire import Call, Event
from orchestrator.platforms.base import CallLost, FunctionSpec, Platform, PlatformError
from tests.support.waiting import eventually


@dataclass
class Bench:
    """A platform with one function deployed, that may have three replicas."""

    platform: Platform
    spec: FunctionSpec
    call: Callable[[str], Call]
    """A call of that id, which works until it is cut."""
    end: Callable[[Call], Any]
    """Cuts it: it ends soon, with `done`."""
    kill: Callable[[str], None]
    """The replica of this name dies."""
    started: list[str] = field(default_factory=list)
    """Ids of calls, as they were taken by a replica;"""
    places: dict[str, str] = field(default_factory=dict)
    """and by which one last."""

    def events(self, call: Call) -> AsyncGenerator[Event, None]:
        return cast(AsyncGenerator[Event, None], self.platform.call(self.spec.name, call))

    async def answer(self, call: Call) -> list[str]:
        """Kinds of its events but for heartbeats."""
        kinds: list[str] = []
        async with aclosing(self.events(call)) as events:
            async for event in events:
                if event.kind == "started":
                    self.started.append(call.id)
                    self.places[call.id] = event.data["replica"]
                if event.kind != "progress":
                    kinds.append(event.kind)
        return kinds

    def begin(self, *ids: str) -> list[tuple[Call, asyncio.Task[list[str]]]]:
        """Calls that are made in this order."""
        calls = [self.call(name) for name in ids]
        return [(call, asyncio.create_task(self.answer(call))) for call in calls]

    async def scale(self, replicas: int) -> None:
        await self.platform.scale(self.spec.name, replicas)

    async def quick(self, name: str) -> list[str]:
        """The answer to a call that is cut from its beginning, made again as often as it is lost."""
        call = self.call(name)
        self.end(call)
        while True:
            with suppress(CallLost):
                return await self.answer(call)
            await asyncio.sleep(0.01)

    def states(self) -> list[str]:
        return sorted(replica.state for replica in self.platform.replicas())

    def names(self) -> set[str]:
        return {replica.name for replica in self.platform.replicas()}


def last_started(bench: Bench, call: str) -> bool:
    return bench.started[-1] == call


class Conformance(ABC):
    @abstractmethod
    def bench(self) -> AbstractAsyncContextManager[Bench]:
        """Opened in the loop of `run`; closes the platform at its end."""

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(test, 100))

    def on(self, test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        async def opened() -> None:
            async with self.bench() as bench:
                await test(bench)

        self.run(opened())

    def test_from_zero_to_an_answer_and_back_to_zero(self) -> None:
        async def test(bench: Bench) -> None:
            platform, clock = bench.platform, asyncio.get_running_loop().time
            assert platform.replicas() == []
            assert platform.usage() == []
            before_s = clock()
            await bench.scale(1)
            [(call, answer)] = bench.begin("a")
            await eventually(lambda: bench.states() == ["busy"])
            [replica] = platform.replicas()
            assert before_s <= replica.since_s <= clock()
            await eventually(lambda: bench.started == ["a"])
            assert (replica.function, replica.name) == (bench.spec.name, bench.places["a"])
            await eventually(lambda: platform.usage()[0].busy_s > 0)
            assert platform.usage()[0].stopped_s is None
            bench.end(call)
            kinds = await answer
            assert (kinds[0], kinds[-1]) == ("started", "done")
            await bench.scale(0)
            await eventually(lambda: platform.replicas() == [])
            lives = platform.usage()
            life = next(life for life in lives if life.replica == replica.name)
            assert life.stopped_s is not None
            assert life.ready_s is not None
            assert before_s <= life.started_s <= life.ready_s <= life.stopped_s <= clock()
            assert 0 < life.busy_s <= life.stopped_s - life.started_s
            assert [life.started_s for life in lives] == sorted(life.started_s for life in lives)

        self.on(test)

    def test_a_replica_has_one_call_at_a_time_and_calls_are_served_as_they_came(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.scale(2)
            calls = bench.begin("a", "b", "c", "d")
            await eventually(lambda: len(bench.started) == 2)
            assert set(bench.started) == {"a", "b"}
            assert bench.states() == ["busy", "busy"]
            for ended, (call, answer) in zip("ab", calls, strict=False):
                bench.end(call)
                assert (await answer)[-1] == "done"
                waited = "cd"["ab".index(ended)]
                await eventually(partial(last_started, bench, waited))
                assert bench.places[waited] == bench.places[ended]
            for call, answer in calls[2:]:
                bench.end(call)
                assert (await answer)[-1] == "done"

        self.on(test)

    def test_scaling_down_spares_busy_replicas_until_their_calls_have_ended(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.scale(3)
            calls = bench.begin("a", "b")
            await eventually(lambda: bench.states() == ["busy", "busy", "idle"])
            await eventually(lambda: len(bench.started) == 2)
            await bench.scale(1)
            await eventually(lambda: bench.names() == set(bench.places.values()))
            (first, answer), (second, other) = calls
            bench.end(second)
            assert (await other)[-1] == "done"
            await eventually(lambda: len(bench.names()) == 1)
            assert bench.names() == {bench.places["a"]}, "the first whose call ends goes"
            bench.end(first)
            assert (await answer)[-1] == "done"
            assert (await bench.quick("c"))[-1] == "done"
            assert bench.places["c"] == bench.places["a"]

        self.on(test)

    def test_busy_replicas_are_taken_back_when_they_are_wanted_again(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.scale(2)
            calls = bench.begin("a", "b")
            await eventually(lambda: len(bench.started) == 2)
            names = bench.names()
            await bench.scale(0)
            with pytest.raises(CallLost, match=f"no replica of '{bench.spec.name}' is wanted$"):
                await bench.answer(bench.call("late"))
            await bench.scale(2)
            assert bench.states() == ["busy", "busy"]
            for call, answer in calls:
                bench.end(call)
                assert (await answer)[-1] == "done"
            assert [await bench.quick(name) for name in "cd"]
            assert bench.names() == names

        self.on(test)

    def test_waiting_calls_are_lost_when_no_replica_is_wanted_any_more(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.scale(1)
            [(call, answer), (_, waiting)] = bench.begin("a", "b")
            await eventually(lambda: bench.started == ["a"])
            await bench.scale(0)
            with pytest.raises(CallLost, match=f"no replica of '{bench.spec.name}' is wanted any more"):
                await waiting
            bench.end(call)
            assert (await answer)[-1] == "done"
            await eventually(lambda: bench.platform.replicas() == [])

        self.on(test)

    def test_closing_the_events_ends_the_call_and_a_cancelled_wait_takes_no_place(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.scale(1)
            [(_, answer), (_, waiting)] = bench.begin("a", "b")
            await eventually(lambda: bench.started == ["a"])
            for task in (waiting, answer):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            assert (await bench.quick("c"))[-1] == "done"
            assert "b" not in bench.started

        self.on(test)

    def test_a_replica_that_dies_loses_its_call_and_is_replaced(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.scale(1)
            [(call, answer)] = bench.begin("a")
            await eventually(lambda: bench.started == ["a"])
            bench.kill(bench.places["a"])
            with pytest.raises(CallLost, match=r"call \S*a"):
                await answer
            assert (await bench.quick("a"))[-1] == "done"
            bench.kill(bench.places["a"])  # idle now
            assert (await bench.quick("b"))[-1] == "done"
            assert call.id == "a"

        self.on(test)

    def test_what_cannot_be_is_one_line(self) -> None:
        async def test(bench: Bench) -> None:
            name = bench.spec.name
            for wrong in (4, -1):
                with pytest.raises(
                    PlatformError, match=f"^{wrong} replicas of '{name}' were asked for; it may have 0 to 3$"
                ):
                    await bench.scale(wrong)
            with pytest.raises(PlatformError, match=rf"^function 'x' is not deployed \(deployed: {name}\)$"):
                await bench.platform.scale("x", 1)
            with pytest.raises(PlatformError, match="function 'x' is not deployed"):
                await anext(aiter(bench.platform.call("x", bench.call("a"))))

        self.on(test)

    def test_deploying_again_replaces_the_spec(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.platform.deploy([replace(bench.spec, max_replicas=4)])
            await bench.scale(4)
            assert (await bench.quick("a"))[-1] == "done"

        self.on(test)

    def test_close_ends_open_and_waiting_calls_as_lost(self) -> None:
        async def test(bench: Bench) -> None:
            await bench.scale(1)
            calls = bench.begin("a", "b")
            await eventually(lambda: bench.started == ["a"])
            await bench.platform.close()
            found = await asyncio.gather(*(answer for _, answer in calls), return_exceptions=True)
            assert [type(error) for error in found] == [CallLost, CallLost]
            assert bench.platform.replicas() == []
            assert all(life.stopped_s is not None for life in bench.platform.usage())
            await bench.platform.close()
            with pytest.raises(PlatformError, match="platform is closed"):
                await bench.platform.deploy([bench.spec])

        self.on(test)
