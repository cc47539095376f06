"""The Knative platform on a real cluster: `pytest -m cluster tests/cluster`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from functions.exchange.open import open_exchange
from functions.wire import Call, Event
from orchestrator.config import KnativeConfig
from orchestrator.platforms.base import FunctionSpec, PlatformError
from orchestrator.platforms.knative import KnativePlatform
from orchestrator.platforms.knative_api import core
from orchestrator.platforms.knative_manifests import JobContext
from orchestrator.platforms.knative_scale import Timing
from tests.cluster.conftest import EXAMPLE, Target, start, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
Figures = Callable[[str, object], None]
REWARD = FunctionSpec("reward", "reward", max_replicas=3, memory_gb=0.5)


def platform(target: Target, *, timing: Timing | None = None) -> KnativePlatform:
    config = KnativeConfig.model_validate(tomllib.loads(f"v = {target.settings}")["v"])
    context = JobContext(target.job, target.exchange, target.job, 300.0, config)
    return KnativePlatform(context, timing=timing)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 600))


async def awaited(condition: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    while not condition():
        await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def refused(there: KnativePlatform, call: str) -> Event:
    """A call that reaches the function and ends at once: it has no such operation."""
    return [event async for event in there.call("reward", Call(call, "nothing"))][-1]


def test_zero_to_first_event_and_back(target: Target, figures: Figures) -> None:
    async def test() -> None:
        there = platform(target)
        try:
            began_s = time.monotonic()
            await there.deploy([REWARD])
            figures("deploy_s", time.monotonic() - began_s)
            assert target.pods() == []
            first: list[float] = []
            tail: list[float] = []
            for n in range(3):
                began_s = time.monotonic()
                await there.scale("reward", 1)
                answer = there.call("reward", Call(f"c{n}", "nothing"))
                assert (await anext(answer)).kind == "started"
                first.append(time.monotonic() - began_s)
                assert [event.kind async for event in answer][-1] == "error"
                await asyncio.sleep(9)  # a stage longer than the autoscaler's window
                await there.scale("reward", 0)
                tail.append(await awaited(lambda: not there.replicas()))
            figures("zero_to_first_event_s", first)
            figures("last_event_to_pods_gone_s", tail)
            assert target.pods() == []
        finally:
            await there.close()

    run(test())


def test_scale_makes_no_new_revision(target: Target, figures: Figures) -> None:
    async def test() -> None:
        there = platform(target)
        try:
            await there.deploy([REWARD])
            for wanted in (1, 3):
                await there.scale("reward", wanted)
                ready = lambda n=wanted: sum(r.state == "idle" for r in there.replicas()) == n  # noqa: E731
                figures(f"to_{wanted}_ready_s", await awaited(ready))
            await there.scale("reward", 1)
            figures("3_to_1_gone_s", await awaited(lambda: len(there.replicas()) == 1))
            assert target.revisions() == [f"{target.job}-reward-00001"]
            assert (await refused(there, "after")).kind == "error"
        finally:
            await there.close()

    run(test())


def test_an_unschedulable_function_is_told(target: Target) -> None:
    async def test() -> None:
        there = platform(target, timing=Timing(pending_s=5.0))
        try:
            await there.deploy([FunctionSpec("reward", "reward", cpus=1000.0)])
            await there.scale("reward", 1)
            with pytest.raises(PlatformError, match=r"has no node.*Insufficient cpu.*-> free or add nodes"):
                await refused(there, "a")
        finally:
            await there.close()

    run(test())


def test_the_job_runs_with_functions_at_zero_before_and_after(target: Target, tmp_path: Path, figures: Figures) -> None:
    words = target.words("steps=3", "validation.every=0", "validation.at_start=false")
    began_s = time.monotonic()
    job = start(["run", EXAMPLE / "job.toml", "--run-dir", tmp_path / "run", *words])
    output, _ = job.communicate(timeout=800)
    assert job.returncode == 0, output
    figures("job_s", time.monotonic() - began_s)
    figures("cost", json.loads((tmp_path / "run" / "cost.json").read_text()))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        figures("step", {k: round(v, 3) for k, v in json.loads(line).items() if k.startswith("timing_s/")})


def test_a_pod_killed_in_mid_stage_changes_nothing(target: Target, tmp_path: Path) -> None:
    words = target.words("steps=2", "validation.every=0", "validation.at_start=false", "deterministic=true")
    job = start(["run", EXAMPLE / "job.toml", "--run-dir", tmp_path / "run", *words])

    def working() -> list[str]:
        """Ready pods of generate."""
        return [
            pod["metadata"]["name"]
            for pod in target.pods()
            if pod["metadata"]["labels"]["rlhf-orchestrate/function"] == "generate"
            and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
        ]

    until(lambda: bool(working()) or job.poll() is not None, 200)
    for name in working():
        target.api.delete(core(target.namespace, "pods", name), grace_s=0)
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output


def test_an_orchestrator_that_dies_leaves_nothing_and_the_job_goes_on(
    target: Target, tmp_path: Path, figures: Figures
) -> None:
    words = target.words("steps=2", "validation.every=0", "validation.at_start=false")
    job = start(["run", EXAMPLE / "job.toml", "--run-dir", tmp_path / "run", *words])
    until(lambda: bool(target.pods()) or job.poll() is not None, 200)
    time.sleep(2)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    zero_s = until(lambda: target.pods() == [], 120)
    figures("orchestrator_killed_to_zero_s", zero_s)
    assert zero_s < 60
    assert target.services() == []
    again = start(["resume", tmp_path / "run"])
    output, _ = again.communicate(timeout=600)
    assert again.returncode == 0, output
    records = open_exchange(target.exchange, target.job).list("journal/")
    assert len(records) >= 3
