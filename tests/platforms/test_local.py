"""The local platform with real processes, forked from a warm parent and fresh."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from functions.base.wire import Call, Event
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError, Replica
from orchestrator.platforms.local import LocalPlatform
from tests.support.processes import descendants, exists
from tests.support.waiting import eventually

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"
COUNT = FunctionSpec("count", f"{FUNCTIONS}:Count", max_replicas=3)
BOTH = pytest.mark.parametrize("warm_parent", [True, False], ids=["warm", "fresh"])


OTHERS: set[int] = set()
"""Servers of other tests' fixtures in this process."""


def ours() -> list[int]:
    """Processes that the test has started."""
    return [pid for pid in descendants(os.getpid()) if pid not in OTHERS]


@asynccontextmanager
async def local(root: Path, *specs: FunctionSpec, warm_parent: bool = True) -> AsyncIterator[LocalPlatform]:
    """A platform that leaves no process behind."""
    OTHERS.update(descendants(os.getpid()))
    platform = LocalPlatform(str(root / "exchange"), "job", log_dir=root / "logs", warm_parent=warm_parent)
    try:
        await platform.deploy(specs or [COUNT])
        yield platform
    finally:
        await platform.close()
        assert platform.replicas() == []
        assert ours() == []


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def answer(platform: LocalPlatform, call: Call, function: str = "count") -> list[Event]:
    return [event async for event in platform.call(function, call) if event.kind != "progress"]


async def collect(platform: LocalPlatform, call: Call, seen: list[Event]) -> None:
    async for event in platform.call("count", call):
        seen.append(event)


async def failure(platform: LocalPlatform, call: Call, function: str) -> Exception | None:
    try:
        await answer(platform, call, function)
    except (CallLost, PlatformError) as error:
        return error
    return None


def states(platform: LocalPlatform) -> list[str]:
    return [replica.state for replica in platform.replicas()]


def counted(events: list[Event]) -> list[int]:
    return [index for event in events if event.kind == "samples" for index in event.data["index"]]


@BOTH
def test_from_zero_to_an_answer_and_back_to_zero(tmp_path: Path, warm_parent: bool) -> None:
    async def test() -> None:
        async with local(tmp_path, warm_parent=warm_parent) as platform:
            assert platform.replicas() == []
            await platform.scale("count", 1)
            events = await answer(platform, Call("c1", "count", params={"n": 2}))
            assert [e.kind for e in events] == ["started", "samples", "samples", "done"]
            assert events[0].data["replica"] == "count-0"
            [replica] = platform.replicas()
            assert (replica.function, replica.name, replica.state) == ("count", "count-0", "idle")
            pid = events[-1].data["pid"]
            assert exists(pid)
            await platform.scale("count", 0)
            await eventually(lambda: platform.replicas() == [])
            assert not exists(pid)
            [usage] = platform.usage()
            assert usage.stopped_s is not None
            assert 0 < usage.busy_s <= usage.stopped_s - usage.started_s
            assert len(ours()) == int(warm_parent)

    run(test())


@BOTH
def test_a_replica_that_is_killed_in_mid_call_is_named_and_replaced(tmp_path: Path, warm_parent: bool) -> None:
    async def test() -> None:
        async with local(tmp_path, warm_parent=warm_parent) as platform:
            await platform.scale("count", 1)
            call = Call("c1", "count", params={"n": 5, "pause_s": 0.1, "log": str(tmp_path / "log"), "kill_at": [2]})
            seen: list[Event] = []
            with pytest.raises(CallLost, match=r"^call c1 was lost: count-0 was killed by SIGKILL$"):
                await collect(platform, call, seen)
            assert counted(seen) == [0, 1]
            again = await answer(platform, call)
            assert again[0].data["replica"] == "count-1"
            assert counted(again) == [0, 1, 2, 3, 4]
            assert [e for e in again if e.kind == "samples"][:2] == [e for e in seen if e.kind == "samples"]
            worked = [int(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines()]
            assert worked == [0, 1, 2, 2, 3, 4]

    run(test())


def test_calls_go_to_free_replicas_first_come_first_served(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 2)
            order: list[str] = []

            async def one(number: int) -> str:
                await asyncio.sleep(number * 0.01)
                events = await answer(platform, Call(f"c{number}", "count", params={"n": 1, "pause_s": 0.3}))
                order.append(f"c{number}")
                return str(events[0].data["replica"])

            replicas = await asyncio.gather(*(one(n) for n in range(6)))
            assert sorted(replicas) == ["count-0"] * 3 + ["count-1"] * 3
            assert [set(order[i : i + 2]) for i in (0, 2, 4)] == [{"c0", "c1"}, {"c2", "c3"}, {"c4", "c5"}]

    run(test())


def test_scaling_down_lets_idle_ones_go_at_once_and_busy_ones_after_their_call(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 3)
            calls = [
                asyncio.create_task(answer(platform, Call(f"c{n}", "count", params={"n": 4, "pause_s": 0.25})))
                for n in range(2)
            ]
            await eventually(lambda: sorted(states(platform)) == ["busy", "busy", "idle"])
            await platform.scale("count", 1)
            await eventually(lambda: sorted(states(platform)) == ["busy", "draining"])
            await platform.scale("count", 2)  # the draining one is taken back
            assert states(platform) == ["busy", "busy"]
            await platform.scale("count", 0)
            assert states(platform) == ["draining", "draining"]
            with pytest.raises(CallLost, match="no replica of 'count' is wanted"):
                await answer(platform, Call("late", "count", params={"n": 1}))
            for events in await asyncio.gather(*calls):
                assert counted(events) == [0, 1, 2, 3]
            await eventually(lambda: platform.replicas() == [])

    run(test())


def test_waiting_calls_are_lost_when_no_replica_is_wanted_any_more(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 1)
            busy = asyncio.create_task(answer(platform, Call("c0", "count", params={"n": 1, "pause_s": 0.5})))
            await eventually(lambda: states(platform) == ["busy"])
            waiting = asyncio.create_task(answer(platform, Call("c1", "count", params={"n": 1})))
            await asyncio.sleep(0)
            await platform.scale("count", 0)
            with pytest.raises(CallLost, match="no replica of 'count' is wanted any more"):
                await waiting
            assert counted(await busy) == [0]

    run(test())


def test_closing_the_events_cancels_the_call_and_a_cancelled_wait_keeps_its_place_free(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 1)
            log = tmp_path / "log"
            events = platform.call("count", Call("c0", "count", params={"n": 500, "pause_s": 0.02, "log": str(log)}))
            async for event in events:
                if event.kind == "samples":
                    break
            waiting = asyncio.create_task(answer(platform, Call("c1", "count", params={"n": 1})))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await events.aclose()  # type: ignore[attr-defined]
            assert counted(await answer(platform, Call("c2", "count", params={"n": 1}))) == [0]
            lines = log.read_text()
            await asyncio.sleep(0.1)
            assert log.read_text() == lines

    run(test())


def test_an_idle_replica_that_dies_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 1)
            events = await answer(platform, Call("c0", "count", params={"n": 1}))
            os.kill(events[-1].data["pid"], signal.SIGKILL)
            await eventually(lambda: [(r.name, r.state) for r in platform.replicas()] == [("count-1", "idle")])
            assert (await answer(platform, Call("c1", "count", params={"n": 1})))[0].data["replica"] == "count-1"

    run(test())


def test_several_functions_and_their_options(tmp_path: Path) -> None:
    named = FunctionSpec("named", f"{FUNCTIONS}:NeedsName", {"name": "x"}, max_replicas=1)
    wrong = FunctionSpec("wrong", f"{FUNCTIONS}:NeedsName", {"nam": "x"}, max_replicas=1)

    async def test() -> None:
        async with local(tmp_path, COUNT, named, wrong) as platform:
            for name in ("count", "named", "wrong"):
                await platform.scale(name, 1)
            assert (await answer(platform, Call("a", "x"), "named"))[-1].data == {"name": "x"}
            error = (await answer(platform, Call("b", "x"), "wrong"))[-1]
            assert error.data["kind"] == "fatal"
            assert "no option 'nam'" in error.data["message"]
            assert counted(await answer(platform, Call("c", "count", params={"n": 1}))) == [0]

    run(test())


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            with pytest.raises(PlatformError, match="4 replicas of 'count' were asked for; it may have 0 to 3"):
                await platform.scale("count", 4)
            with pytest.raises(PlatformError, match=r"function 'cuont' is not deployed \(deployed: count\)"):
                await platform.scale("cuont", 1)
            await platform.scale("count", 1)
            with pytest.raises(PlatformError, match=r"count-0 answered 422 to call \.\./x: not an exchange key"):
                await answer(platform, Call("../x", "count"))
            assert counted(await answer(platform, Call("c", "count", params={"n": 1}))) == [0]

    run(test())


def test_a_function_whose_process_does_not_start_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    dies = tmp_path / "dies.py"
    dies.write_text("import os, sys\nprint('no room for the model', file=sys.stderr, flush=True)\nos._exit(3)\n")

    async def test() -> None:
        spec = FunctionSpec("dies", f"{dies}:F", max_replicas=1)
        async with local(tmp_path, spec, warm_parent=False) as platform:
            await platform.scale("dies", 1)
            failures = [await failure(platform, Call("c", "x"), "dies")]
            while isinstance(failures[-1], CallLost):
                assert len(failures) < 20, failures
                failures.append(await failure(platform, Call("c", "x"), "dies"))
            said = r"replicas of 'dies' do not start: dies-\d ended with exit code 3: no room for the model"
            assert len(failures) > 1
            assert type(failures[-1]) is PlatformError
            assert re.match(said, str(failures[-1]))

    run(test())


def test_a_warm_parent_that_cannot_be_forked_safely_is_refused(tmp_path: Path) -> None:
    threaded = tmp_path / "threaded.py"
    threaded.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )

    async def test() -> None:
        spec = FunctionSpec("threaded", f"{threaded}:F", max_replicas=1)
        async with local(tmp_path, spec) as platform:
            await platform.scale("threaded", 1)
            error = await failure(platform, Call("c", "x"), "threaded")
            assert type(error) is PlatformError
            assert "the warm parent has 2 threads after loading" in str(error)
            assert "a fork is not safe" in str(error)

    run(test())


def test_a_warm_parent_that_dies_takes_its_replicas_along_and_is_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 1)
            events = await answer(platform, Call("c0", "count", params={"n": 1}))
            parent, pid = ours()
            assert pid == events[-1].data["pid"]
            os.kill(parent, signal.SIGKILL)
            await eventually(lambda: not exists(pid))
            await eventually(lambda: any(r.name != "count-0" for r in platform.replicas()))
            assert counted(await answer(platform, Call("c1", "count", params={"n": 1}))) == [0]

    run(test())


def test_open_calls_end_in_call_lost_when_the_platform_closes(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 1)
            open_ = asyncio.create_task(answer(platform, Call("c0", "count", params={"n": 1, "pause_s": 60})))
            await eventually(lambda: states(platform) == ["busy"])
            await platform.close()
            with pytest.raises(CallLost):
                await open_
            assert all(usage.stopped_s is not None for usage in platform.usage())

    run(test())


def test_closing_while_the_warm_parent_loads_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 2)
            assert states(platform) == ["starting", "starting"]

    run(test())


ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from functions.base.wire import Call
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform
from tests.support.processes import descendants, exists

async def main():
    root = Path(sys.argv[1])
    platform = LocalPlatform(str(root / "exchange"), "job", log_dir=root / "logs", warm_parent=sys.argv[2] == "True")
    await platform.deploy([FunctionSpec("count", sys.argv[3], max_replicas=2)])
    await platform.scale("count", 2)
    async for event in platform.call("count", Call("c", "count", params={"n": 1000, "pause_s": 0.1})):
        print(event.kind, flush=True)

asyncio.run(main())
"""


@BOTH
def test_when_the_orchestrator_is_killed_all_its_processes_go(tmp_path: Path, warm_parent: bool) -> None:
    command = [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), str(warm_parent), COUNT.kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as orchestrator:
        assert orchestrator.stdout is not None
        assert orchestrator.stdout.readline() == "started\n"
        children = descendants(orchestrator.pid)
        assert len(children) == 2 + int(warm_parent)
        orchestrator.kill()
    run(eventually(lambda: not any(map(exists, children))))


def test_replica_is_what_the_interface_says(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            clock = asyncio.get_running_loop().time
            before_s = clock()
            await platform.scale("count", 1)
            [replica] = platform.replicas()
            assert isinstance(replica, Replica)
            assert before_s <= replica.since_s <= clock()
            call = asyncio.create_task(answer(platform, Call("c", "count", params={"n": 1, "pause_s": 0.3})))
            await eventually(lambda: states(platform) == ["busy"])
            await asyncio.sleep(0.1)
            [usage] = platform.usage()
            assert usage.stopped_s is None
            assert usage.busy_s == pytest.approx(clock() - platform.replicas()[0].since_s, abs=0.05)
            await call

    run(test())


def test_logs_of_replicas_are_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path, FunctionSpec("fails", f"{FUNCTIONS}:Fails")) as platform:
            await platform.scale("fails", 1)
            assert (await answer(platform, Call("c", "odd"), "fails"))[-1].data["kind"] == "retryable"
        assert "ZeroDivisionError" in (tmp_path / "logs" / "fails-0.log").read_text()

    run(test())
