"""A gateway without HTTP: replicas that die in mid-call, that go when nobody asks, and what cannot be served."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.api.gateway.app import Served
from orchestrator.api.gateway.gateway import Sampling, Stream
from orchestrator.api.gateway.start import Options, opened
from orchestrator.base.errors import ConfigError, OrchestratorError
from orchestrator.platforms.local import LocalPlatform
from tests.support.waiting import eventually

MODEL = Path(__file__).parents[2] / "examples" / "arithmetic" / "model"
LONG = Sampling(48, 0.0, ignore_eos=True)


async def finished(stream: Stream) -> list[int]:
    async for _ in stream.pieces():
        pass
    assert stream.error is None
    return stream.tokens


def started(served: Served, digits: Sequence[int]) -> list[Stream]:
    prompts = [served.chat.encode(f"<|user|>{n % 10}+{n // 10}=?<|assistant|>") for n in digits]
    streams = [Stream(prompt, LONG, n, 0, live=True) for n, prompt in zip(digits, prompts, strict=True)]
    for stream in streams:
        served.gateway.start(stream)
    return streams


async def survives() -> None:
    options = Options(str(MODEL), slots=8, slice_s=0.01, idle_s=0.2)
    async with opened(options) as served, served.gateway as gateway:
        platform = gateway._platform
        assert isinstance(platform, LocalPlatform)
        assert platform.replicas() == [], "from zero"
        undisturbed = [await finished(stream) for stream in started(served, range(24))]
        await eventually(lambda: platform.replicas() == [])
        streams = started(served, range(24))
        working = [asyncio.create_task(finished(stream)) for stream in streams]
        await eventually(lambda: any(stream.tokens for stream in streams))
        for pid in platform.processes()["generate"]:
            os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*working) == undisturbed
        assert {len(tokens) for tokens in undisturbed} == {48}


def test_a_killed_replica_changes_no_token_and_idle_ones_go() -> None:
    asyncio.run(survives())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"what": "/nowhere/at/all"}, "neither a model's directory, a run's, nor an id of the Hub"),
        ({"what": str(MODEL), "replicas": 0}, "--replicas: got 0, wants 1 or more"),
        ({"what": str(MODEL), "slots": 0}, "--slots: got 0, wants 1 or more"),
        ({"what": str(MODEL), "idle_s": 0.0}, "--idle-s: got 0, wants more than 0"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(wrong: dict[str, object], said: str) -> None:
    async def start() -> None:
        async with opened(Options(**wrong)):  # type: ignore[arg-type]
            pass

    with pytest.raises(ConfigError, match=said) as raised:
        asyncio.run(start())
    assert "\n" not in str(raised.value)


def test_a_run_that_has_committed_nothing(tmp_path: Path) -> None:
    from orchestrator.job.config import load_job
    from orchestrator.run.directory import RunDirectory

    RunDirectory.create(tmp_path / "run", load_job(MODEL.parent / "job.toml"))

    async def start() -> None:
        async with opened(Options(str(tmp_path / "run"))):
            pass

    with pytest.raises(OrchestratorError, match="has committed nothing yet; name the model's directory"):
        asyncio.run(start())
