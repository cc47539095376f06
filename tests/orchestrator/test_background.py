"""Tasks beside the work: none dies unseen, and what fails for a while is told once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from orchestrator.base.background import Retried, guarded, stopped
from orchestrator.base.errors import RunError


async def ends() -> None:
    await asyncio.sleep(0)


async def fails() -> None:
    await asyncio.sleep(0)
    raise KeyError("x")


async def forever() -> None:
    await asyncio.Event().wait()


def test_an_endless_task_that_ends_is_told_in_one_line() -> None:
    told: list[str] = []

    async def run() -> None:
        await guarded("one", ends, told.append)
        await guarded("two", fails, told.append)
        await stopped(guarded("three", forever, told.append))

    asyncio.run(run())
    assert told == ["one has ended, and never should", "two has ended: KeyError: 'x'"]


def test_whoever_waits_for_one_that_is_stopped_can_be_cancelled() -> None:
    told: list[str] = []

    async def run() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def slow_to_end() -> None:
            try:
                await forever()
            finally:
                begun.set()
                await may_end.wait()

        task = guarded("it", slow_to_end, told.append)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = asyncio.create_task(stopped(task))
        await begun.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert told == []


def test_what_fails_for_a_while_is_told_when_it_begins_to() -> None:
    told: list[str] = []
    retried = Retried(told.append)

    def write(works: bool) -> None:
        if not works:
            raise RunError("the disk is full")

    for works in (True, False, False, True, False):
        retried.attempt("it", partial(write, works))
    assert told == ["it: the disk is full; tried again until it works"] * 2
    with pytest.raises(ZeroDivisionError):
        retried.attempt("a bug", lambda: 1 // 0)


FULL = """
import resource, sys
from pathlib import Path
from orchestrator.base.files import Lines
from orchestrator.base.errors import RunError
path = Path(sys.argv[1])
lines = Lines(path, 0)
lines.append(b"a" * 59 + b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        lines.append(b"b" * 59 + b"\\n")
        sys.exit("written where there was no room")
    except RunError:
        pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.append(b"c" * 59 + b"\\n")
"""


def test_a_line_that_has_no_room_leaves_no_half_of_it(tmp_path: Path) -> None:
    """A file that may grow to 100 bytes takes 40 of the second line's 60."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "lines")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lines").read_text().split("\n") == ["a" * 59, "c" * 59, ""]
