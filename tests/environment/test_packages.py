"""The field's environments, by their own packages where these are installed: verifiers' tasksets, OpenEnv's servers."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from functions.base.samples import Columns, Finish, SampleBatch
from functions.call.function import FatalError
from functions.environment.function import EnvironmentFunction
from functions.environment.kinds import open_kind
from tests.environment.test_function import Scene
from tests.support.waiting import until

TASKSET = """
from openai import AsyncOpenAI
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

class Sum(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.name)

class SumsConfig(vf.TasksetConfig):
    least: int = 0

class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        if self.config.least > 9:
            raise ValueError("no task has a Dockerfile that is built")
        for number in range(self.config.least, 3):
            yield Sum(vf.TaskData(prompt=f"{number}+1", name=str(number + 1)), self.config.task)

class Asks(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for more in ("sure?", None):
            said = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages.append({"role": "assistant", "content": said.choices[0].message.content})
            messages.append({"role": "user", "content": more})
        return ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Sums", "Asks"]
"""
SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    message: str

class Told(Observation):
    told: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="x", step_count=0)
    def reset(self, seed=None, episode_id=None, **rest):
        self._state = State(episode_id="x", step_count=0)
        return Told(told="guess", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **rest):
        self._state.step_count += 1
        right = action.message == "7"
        return Told(told="yes" if right else "no", done=right, reward=float(right) / self._state.step_count)
    @property
    def state(self):
        return self._state

uvicorn.run(create_app(Game, Guess, Told, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its loop lives as long as a replica
def test_a_taskset_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="the package verifiers is not installed (an optional extra)")
    (tmp_path / "sums_for_tests.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    scene = Scene(tmp_path, "", "")
    scene.kind = "verifiers:sums-for-tests"
    begun = SampleBatch.of_prompts([scene.ids("?")], samples_per_prompt=2, version=0)
    on, _, _ = scene.answered(scene.act(begun, {"task": 1}))
    assert scene.tokenizer.decode(on.prompts[0].tolist()) == "1+1="
    on, _, _ = scene.answered(scene.act(scene.said(on, ["2", "2"]), {"task": 1}))
    assert scene.text(on, 0) == "2|sure?="
    _, over, data = scene.answered(scene.act(scene.said(on, ["3", "2"]), {"task": 1}))
    assert over.finish.tolist() == [Finish.STOP] * 2
    assert Columns.align(over, data["columns"]).sample["score"].tolist() == [0.0, 1.0]
    with pytest.raises(FatalError, match=r"the row's task is 9; wants a place in the taskset"):
        scene.act(begun, {"task": 9}, episodes="calls/s1.episodes/other/")
    for kind, line in (
        ("no-such", r".*not found"), ("sums-for-tests?least=10", "ValueError: no task has a Dockerfile that is built"),
        ("sums-for-tests?most=3", r".*most.*"),
    ):  # fmt: skip
        with pytest.raises(FatalError, match=rf"^verifiers:{re.escape(kind)}: {line}"):
            open_kind(f"verifiers:{kind}")
    scene.kind = "verifiers:sums-for-tests?least=1"
    on, _, _ = scene.answered(scene.act(begun, {"task": 1}, episodes="calls/s1.episodes/third/"))
    assert scene.tokenizer.decode(on.prompts[0].tolist()) == "2+1=", "what else is said is the taskset's"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the replica that is no more
def test_an_openenv_server(tmp_path: Path) -> None:
    pytest.importorskip("openenv", reason="the package openenv is not installed (an optional extra)")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])
    try:
        until(lambda: listens(port))
        scene = Scene(tmp_path, "", "")
        scene.kind = f"openenv:http://127.0.0.1:{port}?observation=told"
        on, over, data = scene.answered(scene.act(scene.first(["5", "7"])))
        assert scene.text(on, 0) == "5|no="
        assert (over.finish.tolist(), data["columns"][0].sample["score"].tolist()) == ([Finish.ENVIRONMENT], [1.0])
        scene.function = EnvironmentFunction()
        _, over, data = scene.answered(scene.act(scene.said(on, ["7"])))
        assert data["columns"][0].sample["score"].tolist() == [0.5], "begun again on another replica, by its turn"
    finally:
        server.terminate()
        server.wait()
    with pytest.raises(FatalError, match="names no server"):
        open_kind("openenv:game")


def listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False
