"""helm test: a function goes from zero to an answer and back to zero, through Knative, on a CPU.

python roundtrip.py defaults.json JOB        JOB: of the pod, as a runner's (<job>-<launch>-<random>)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from functions.base.wire import Call
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.config import KnativeConfig
from orchestrator.platforms.knative.manifests import JobContext
from orchestrator.platforms.knative.platform import KnativePlatform


async def main() -> None:
    defaults = json.loads(Path(sys.argv[1]).read_text())
    config = KnativeConfig.model_validate(defaults["platform"]["knative"])
    job = sys.argv[2]
    platform = KnativePlatform(JobContext(job, defaults["exchange"]["url"], job, 300.0, config))
    try:
        await platform.deploy([FunctionSpec("reward", "reward", memory_gb=1.0)])
        await platform.scale("reward", 1)
        begun_s = time.monotonic()
        events = [event async for event in platform.call("reward", Call("probe", "no-such-operation"))]
        assert [event.kind for event in events if event.kind != "progress"] == ["started", "error"], events
        assert "no-such-operation" in events[-1].data["message"], "the function itself has answered"
        print(f"from zero to an answer in {time.monotonic() - begun_s:.1f} s")
        await platform.scale("reward", 0)
        while platform.replicas():
            await asyncio.sleep(0.1)
        print(f"back at zero after {time.monotonic() - begun_s:.1f} s")
    finally:
        await platform.close()


asyncio.run(asyncio.wait_for(main(), 600))
