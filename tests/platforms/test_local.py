"""The local platform with real processes, forked from the node agent and fresh."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from functions.base.wire import Call, Event
from functions.exchange.directory import DirectoryExchange
from functions.server.forkserver_client import FORKSERVER
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError
from orchestrator.platforms.local import LocalPlatform
from tests.platforms.conformance import Bench, Conformance
from tests.support.processes import descendants, exists
from tests.support.waiting import eventually, until

FUNCTIONS = Path(__file__).parents[1] / "server" / "functions_for_tests.py"
COUNT = FunctionSpec("count", f"{FUNCTIONS}:Count", max_replicas=3)
FORKS = FunctionSpec("forks", f"{FUNCTIONS}:Forks")
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
        await eventually(lambda: not ours())  # an agent that was forked elsewhere is nobody's to wait for here


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


class TestLocal(Conformance):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    @asynccontextmanager
    async def bench(self) -> AsyncIterator[Bench]:
        exchange = DirectoryExchange(str(self.root / "exchange" / "job"))

        def kill(name: str) -> None:
            number = [replica.name for replica in platform.replicas()].index(name)
            os.kill(platform.processes()["count"][number], signal.SIGKILL)

        async with local(self.root) as platform:
            yield Bench(platform, COUNT, endless, lambda call: exchange.put(call.cut_key, b"cut"), kill)


def endless(name: str) -> Call:
    """Of Count: its work takes a minute, or until it is cut."""
    return Call(name, "count", params={"n": 1, "pause_s": 60})


@BOTH
def test_zero_replicas_are_no_process(tmp_path: Path, warm_parent: bool) -> None:
    async def test() -> None:
        async with local(tmp_path, warm_parent=warm_parent) as platform:
            await platform.scale("count", 1)
            events = await answer(platform, Call("c1", "count", params={"n": 2}))
            assert [e.kind for e in events] == ["started", "samples", "samples", "done"]
            assert events[0].data["replica"] == "count-0"
            pid = events[-1].data["pid"]
            assert platform.processes() == {"count": [pid]}
            assert exists(pid)
            await platform.scale("count", 0)
            await eventually(lambda: platform.replicas() == [])
            assert not exists(pid)
            assert len(ours()) == 1, "the agent"

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


def test_a_replica_that_is_let_go_parks_and_the_next_one_is_the_same_process(tmp_path: Path) -> None:
    async def test() -> None:
        parks = FunctionSpec("parks", f"{FUNCTIONS}:Parks", max_replicas=2)
        async with local(tmp_path, parks) as platform:
            await platform.scale("parks", 1)
            held = (await answer(platform, Call("a", "hold", params={"version": 4}), "parks"))[-1].data
            await platform.scale("parks", 0)
            await eventually(lambda: platform.replicas() == [])
            assert exists(held["pid"])
            assert platform.processes() == {"parks": []}
            assert [life.stopped_s is not None for life in platform.usage()] == [True], "nothing is paid for it"
            await platform.scale("parks", 2)
            asked = [answer(platform, Call(name, "held"), "parks") for name in ("b", "c")]
            events = [events[-1].data for events in await asyncio.gather(*asked)]
            found = {data["pid"]: (data["version"], data["name"]) for data in events}
            assert found.pop(held["pid"]) == (4, "parks-1")
            assert all(version is None for version, _ in found.values()), "there was one that was parked"
            [ours_now] = {r.name for r in platform.replicas()} - {"parks-2"}
            assert ours_now == "parks-1"
            before, after = ([u for u in platform.usage() if u.replica == name] for name in ("parks-0", "parks-1"))
            assert before[0].stopped_s is not None
            assert 0 < after[0].parked_s <= asyncio.get_running_loop().time() - before[0].started_s
            assert [u.parked_s for u in platform.usage() if u.replica != "parks-1"] == [0.0, 0.0]

    run(test())


def test_what_is_at_work_on_a_call_that_nobody_waits_for_does_not_park(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path, FunctionSpec("parks", f"{FUNCTIONS}:Parks")) as platform:
            await platform.scale("parks", 1)
            pid = (await answer(platform, Call("a", "held"), "parks"))[-1].data["pid"]
            late = Call("b", "sleep", deadline_s=0.2)
            assert "deadline" in (await answer(platform, late, "parks"))[-1].data["message"]
            await eventually(lambda: not exists(pid))
            assert (await answer(platform, Call("c", "held"), "parks"))[-1].data["pid"] != pid

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


def test_a_call_that_is_refused_is_one_line_and_the_replica_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 1)
            said = r"^call \.\./x to count-0 was answered with 422: not an exchange key"
            with pytest.raises(PlatformError, match=said):
                await answer(platform, Call("../x", "count"))
            assert counted(await answer(platform, Call("c", "count", params={"n": 1}))) == [0]

    run(test())


def test_a_replica_that_is_gone_before_its_call_is_sent_loses_it(tmp_path: Path) -> None:
    """It starts, gets the call that waits, and is gone, all in one turn of the loop: nothing is left to be called."""
    dies = tmp_path / "dies.py"
    dies.write_text(f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nos._exit(3)\n")

    async def test() -> None:
        async with local(tmp_path, FunctionSpec("dies", f"{dies}:F"), warm_parent=False) as platform:
            await platform.scale("dies", 1)
            call = asyncio.create_task(failure(platform, Call("c", "x"), "dies"))
            await asyncio.sleep(0)
            until(lambda: (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()) and gone(int(pid)))
            assert type(await call) is CallLost

    def gone(pid: int) -> bool:
        """Reaped, by a keeper that the parent has reaped too: its end has been told, and not been heard."""
        return not exists(pid) and len(ours()) == 1

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


def test_an_agent_that_cannot_fork_safely_is_refused(tmp_path: Path) -> None:
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
            assert "the node agent has 2 threads after loading" in str(error)
            assert "a fork is not safe" in str(error)

    run(test())


def test_an_agent_that_dies_takes_its_replicas_along_and_is_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path) as platform:
            await platform.scale("count", 1)
            events = await answer(platform, Call("c0", "count", params={"n": 1}))
            agent, keeper, pid = ours()
            assert pid == events[-1].data["pid"]
            os.kill(agent, signal.SIGKILL)
            await eventually(lambda: not exists(pid) and not exists(keeper))
            await eventually(lambda: any(r.name != "count-0" for r in platform.replicas()))
            assert counted(await answer(platform, Call("c1", "count", params={"n": 1}))) == [0]

    run(test())


def test_closing_while_the_agent_loads_leaves_nothing(tmp_path: Path) -> None:
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
    await platform.deploy([FunctionSpec("forks", sys.argv[3], max_replicas=2)])
    await platform.scale("forks", 2)
    async for event in platform.call("forks", Call("c", "work", params={"log": sys.argv[4]})):
        pass

asyncio.run(main())
"""


@BOTH
def test_when_the_orchestrator_is_killed_all_its_processes_go(tmp_path: Path, warm_parent: bool) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), str(warm_parent), FORKS.kind, str(log)]
    env = {name: value for name, value in os.environ.items() if name != FORKSERVER}  # the agent is a child of its own
    with subprocess.Popen(command, env=env) as orchestrator:
        until(lambda: len(logged(log)) == 2, within_s=60)
        until(lambda: len(descendants(orchestrator.pid)) == 1 + 2 * 2 + 2)
        children = descendants(orchestrator.pid)
        assert set(logged(log)) < set(children)
        orchestrator.kill()
    until(lambda: not any(map(exists, children)))


@BOTH
@pytest.mark.parametrize("killed", ["replica", "keeper", "nothing"])
def test_nothing_of_a_replica_survives_it(tmp_path: Path, warm_parent: bool, killed: str) -> None:
    log = tmp_path / "log"

    async def test() -> None:
        async with local(tmp_path, FORKS, warm_parent=warm_parent) as platform:
            await platform.scale("forks", 1)
            operation = "end" if killed == "nothing" else "work"
            call = asyncio.create_task(failure(platform, Call("c", operation, params={"log": str(log)}), "forks"))
            await eventually(lambda: len(logged(log)) == 2)
            assert all(map(exists, logged(log)))
            if killed == "nothing":
                assert await call is None
                await platform.scale("forks", 0)
                await eventually(lambda: platform.replicas() == [])
                assert not any(map(exists, logged(log))), "it is gone when they are"
                return
            [replica] = platform.processes()["forks"]
            os.kill(replica if killed == "replica" else parent_of(replica), signal.SIGKILL)
            assert str(await call) == "call c was lost: forks-0 was killed by SIGKILL"
            await eventually(lambda: not any(map(exists, [replica, *logged(log)])))

    run(test())


def logged(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@BOTH
def test_memory_gb_bounds_a_replica(tmp_path: Path, warm_parent: bool) -> None:
    """It never takes more than 512 MB, bounded or not."""

    async def test() -> None:
        eats = FunctionSpec("eats", f"{FUNCTIONS}:Eats", memory_gb=0.25)
        async with local(
            tmp_path, eats, replace(eats, name="free", memory_gb=None), replace(eats, name="gpu", gpus=1),
            warm_parent=warm_parent,
        ) as platform:  # fmt: skip
            for name in ("eats", "free", "gpu"):
                await platform.scale(name, 1)
            error = (await answer(platform, Call("a", "eat", params={"mb": 512}), "eats"))[-1].data
            assert error["kind"] == "retryable"
            assert re.match(
                r"MemoryError: its replica may take no more -> raise memory_gb of its function \(.*\.py:\d+\)$",
                error["message"],
            )
            assert (await answer(platform, Call("b", "eat", params={"mb": 128}), "eats"))[-1].kind == "done"
            free = (await answer(platform, Call("c", "eat", params={"mb": 512}), "free"))[-1].data
            machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            assert machine < free["limit"] < 2 * machine
            gpu = (await answer(platform, Call("d", "eat", params={"mb": 0}), "gpu"))[-1].data
            assert gpu["limit"] == resource.getrlimit(resource.RLIMIT_DATA)[0], "as the test's own"

    run(test())


def test_logs_of_replicas_are_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with local(tmp_path, FunctionSpec("fails", f"{FUNCTIONS}:Fails")) as platform:
            await platform.scale("fails", 1)
            assert (await answer(platform, Call("c", "odd"), "fails"))[-1].data["kind"] == "retryable"
        assert "ZeroDivisionError" in (tmp_path / "logs" / "fails-0.log").read_text()

    run(test())
