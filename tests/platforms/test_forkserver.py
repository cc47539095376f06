"""Node agents from a forkserver (functions/server/forkserver.py): a job's own, or none."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from functions.base.wire import Call, Json
from functions.server.forkserver_client import FORKSERVER, keep
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform
from tests.support.forked import ForkedCommand
from tests.support.processes import exists
from tests.support.tiny_job import ENV, assert_nothing_left, left
from tests.support.waiting import until

TELLS = """
import os, sys, tempfile
from functions.base.wire import Event

class Tells:
    def call(self, call, context):
        imported = {"torch": "torch" in sys.modules, "path": sys.path[0]}
        about = {"env": dict(os.environ), "directory": os.getcwd(), "temporary": tempfile.gettempdir()}
        yield Event("done", data={"pid": os.getpid(), **imported, **about})
"""


async def told(root: Path) -> Json:
    """What a function of a job says about its process, which is gone with its job when this returns."""
    (root / "tells.py").write_text(TELLS)
    platform = LocalPlatform(str(root / "exchange"), "job", log_dir=root / "logs")
    try:
        await platform.deploy([FunctionSpec("tells", f"{root}/tells.py:Tells")])
        await platform.scale("tells", 1)
        call = Call(f"c{time.monotonic_ns()}", "tell")
        [event] = [event async for event in platform.call("tells", call) if event.kind == "done"]
    finally:
        await platform.close()
    assert not exists(event.data["pid"])
    return dict(event.data)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """That of a job at the worker's forkserver."""
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("A_SECRET", "of this job")
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def test_a_jobs_functions_have_its_environment_and_directory(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = asyncio.run(told(tmp_path))
    environment.delenv("A_SECRET")
    second = asyncio.run(told(tmp_path))
    for found in (first, second):
        assert found["torch"], "which a function like this one does not load"
        assert (found["directory"], found["path"]) == (str(tmp_path), str(tmp_path))
        assert found["temporary"] == f"{tmp_path}/tmp"
    assert first["env"]["A_SECRET"] == "of this job"
    assert "A_SECRET" not in second["env"]


@pytest.mark.parametrize("differs", ["environment", "code", "it has ended"])
def test_what_would_have_loaded_something_else_starts_its_own_agent(
    environment: pytest.MonkeyPatch, tmp_path: Path, differs: str
) -> None:
    code = tmp_path / "code"
    (code / "functions").mkdir(parents=True)
    for part in (Path(__file__).parents[2] / "functions").iterdir():
        (code / "functions" / part.name).symlink_to(part)
    env = {**os.environ, **({"PYTHONPATH": str(code)} if differs == "code" else {})}
    with keep(env) as path:
        environment.setenv(FORKSERVER, path)
        if differs == "environment":
            environment.setenv("HF_HUB_OFFLINE", "0")
        if differs != "it has ended":
            found = asyncio.run(told(tmp_path))
    until(lambda: not Path(path).parent.exists())
    if differs == "it has ended":
        found = asyncio.run(told(tmp_path))
    assert not found["torch"]
    assert "no agent of the forkserver" in (tmp_path / "logs" / "node-agent.log").read_text()


def leave_one(_words: Sequence[str]) -> int:
    if os.fork() == 0:
        signal.pause()
    return 0


def test_a_process_that_a_test_leaves_is_seen() -> None:
    """By `assert_nothing_left`, whoever has forked it."""
    ForkedCommand(leave_one, [], ENV).communicate(60)
    until(lambda: len(left()) == 1)
    os.kill(left()[0], signal.SIGKILL)
    assert_nothing_left()
