"""On a cluster with Knative and the chart's node agents: from zero pods to the first sample, and a step from zero.

    python bench/parked_cluster.py sample --exchange URL --ingress URL [--release parked] [--layers 13] [--rounds 10]
    python bench/parked_cluster.py step --api URL --token TOKEN --job JOB.json [--steps 5]

sample    a random Llama in bfloat16 behind vLLM, turn by turn: a bare pod of the function's container until Ready; a
          replica from zero to its first sample whose process was parked; one whose policy is new since (a delta of
          1 % of the weights); one without an agent. After its first sample each makes others for longer than Knative's
          window, and is let go at the last event: how long until its pod is gone, and the resource free
step      a job with its files, by POST to a release's API: every function let go as its stage is done (planner.policy
          "static"), and all kept (planner.keep_warm). Before each step the job waits until Knative lets go: that is
          not counted; medians from step 2 on, the first one with something parked

KUBECONFIG names the cluster. `--exchange` is an exchange as this machine and the pods reach it; its credentials are in
the environment here, and in the release's Secret there. Functions ask for one of the release's `functions.gpuResource`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.parked import MODEL  # noqa: E402
from functions.base.samples import SampleBatch  # noqa: E402
from functions.base.wire import ALIVE, Call, Event, Version  # noqa: E402
from functions.exchange.base import Exchange  # noqa: E402
from functions.exchange.open import open_exchange  # noqa: E402
from functions.weights.base import import_model  # noqa: E402
from functions.weights.blobs import Blob, publish_blobs  # noqa: E402
from functions.weights.delta import difference  # noqa: E402
from functions.weights.manifest import read_manifest  # noqa: E402
from functions.weights.store import blobs, fetch  # noqa: E402
from orchestrator.api.upload import send_files  # noqa: E402
from orchestrator.platforms.base import FunctionSpec  # noqa: E402
from orchestrator.platforms.config import KnativeConfig  # noqa: E402
from orchestrator.platforms.knative.api import KubeApi, core  # noqa: E402
from orchestrator.platforms.knative.manifests import JobContext, service  # noqa: E402
from orchestrator.platforms.knative.platform import KnativePlatform  # noqa: E402

CHANGED = 0.01
LONG_S = 9.0
"""Knative marks a function inactive no sooner after its last request."""
ENDED = ("succeeded", "failed", "cancelled")


def flipped(blob: Blob, rng: np.random.Generator) -> Blob:
    data = np.frombuffer(blob.data, np.uint16).copy()
    data ^= (rng.random(len(data), np.float32) < CHANGED).astype(np.uint16)
    return Blob(blob.dtype, blob.shape, data.view(np.uint8).data)


def next_version(exchange: Exchange, parent: Version, rng: np.random.Generator) -> Version:
    """`parent` with one weight in a hundred changed in its lowest bit."""
    manifest = read_manifest(exchange, parent)
    old = blobs(fetch(exchange, parent))
    new = {name: flipped(blob, rng) for name, blob in old.items()}
    change = difference(manifest, old, new)
    assert change is not None
    version = Version(parent.model, parent.number + 1, "bench")
    publish_blobs(
        exchange, version, tensors=new, state={}, trainer={}, files=manifest.files, parent=parent, delta=change.parts
    )
    return version


def bare_start(api: KubeApi, context: JobContext, spec: FunctionSpec) -> float:
    """Seconds from the creation of a pod with the function's container alone, and no agent, until it is Ready."""
    template = service(context, spec)["spec"]["template"]["spec"]
    container = template["containers"][0]
    container["readinessProbe"] = {"httpGet": {"path": "/healthz/ready", "port": 8080}, "periodSeconds": 1}
    kept = {key: template[key] for key in ("volumes", "serviceAccountName", "automountServiceAccountToken")}
    meta = {"name": f"{context.job}-bare-{uuid.uuid4().hex[:4]}"}
    rest = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1}
    path = core(context.config.namespace, "pods")
    began_s = time.monotonic()
    api.create(path, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": kept | rest})
    own = f"{path}/{meta['name']}"
    try:
        while True:
            conditions = api.get(own).get("status", {}).get("conditions", ())
            if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                return time.monotonic() - began_s
            time.sleep(0.05)
    finally:
        api.delete(own, grace_s=1)


async def until(condition: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    while not condition():
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


class Turns:
    """One platform, with or without agents, and what its turns took."""

    def __init__(self, exchange: Exchange, url: str, config: KnativeConfig, job: str, tokens: int) -> None:
        self.exchange, self.tokens = exchange, tokens
        options = {"engine": "vllm", "dtype": "bfloat16", "slots": 16, "vllm": {"context": 1024, "kv_cache_mb": 256}}
        self.spec = FunctionSpec("generate", "generate", options, gpus=1, memory_gb=3)
        name = f"{job}-{'a' if config.node_agent else 'n'}"
        self.context = JobContext(name, url, job, 600.0, config)
        self.platform = KnativePlatform(self.context)

    async def turn(self, version: Version) -> tuple[float, float]:
        """Seconds from zero to the first sample, and from the last event of a stage to no pod."""
        began_s = time.monotonic()
        await self.platform.scale("generate", 1)
        await self.sampled(version, 1, 4)
        first_s, before = time.monotonic() - began_s, time.monotonic()
        while time.monotonic() - before < LONG_S:  # each call keeps the function active for the window from its start
            last_s = time.monotonic()
            await self.sampled(version, 8, self.tokens)
            self.tokens = min(400, int(self.tokens * max(1.0, 1.2 * LONG_S / (time.monotonic() - last_s))))
        ended_s = time.monotonic()
        await self.platform.scale("generate", 0)
        await until(lambda: not self.platform.replicas())
        return first_s, time.monotonic() - ended_s

    async def sampled(self, version: Version, samples: int, tokens: int) -> Event:
        name = f"call-{uuid.uuid4().hex[:8]}"
        prompts = SampleBatch.of_prompts([[5, 6, 7, 8, 9]], samples_per_prompt=samples, version=version.number)
        inputs = {"samples": [await asyncio.to_thread(self.exchange.put, f"batches/{name}", prompts.encode())]}
        params = {"max_response_length": tokens, "ignore_eos": True, "chunk": 1}
        async for event in self.platform.call("generate", Call(name, "generate", inputs, {"policy": version}, params)):
            last = event
        if last.kind != "done":
            raise SystemExit(f"the call failed: {last.data}")
        return last


async def samples(given: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    api, job, rng = KubeApi(), f"bench{uuid.uuid4().hex[:6]}", np.random.default_rng(0)
    full = f"{given.release}-rlhf-orchestrate"
    told = json.loads(api.get(core(given.namespace, "configmaps", f"{full}-config"))["data"]["defaults.json"])
    config = KnativeConfig.model_validate(told["platform"]["knative"] | {"ingress": given.ingress})
    plain = config.model_copy(update={"node_agent": None})
    subprocess.run([sys.executable, "-c", MODEL, str(folder / "model"), str(given.layers)], check=True, cwd=ROOT)
    exchange = open_exchange(given.exchange, job)
    version = import_model(exchange, "actor", folder / "model")
    ways = {
        name: Turns(exchange, given.exchange, c, job, given.tokens) for name, c in (("parked", config), ("none", plain))
    }

    async def alive() -> None:
        while True:
            await asyncio.to_thread(exchange.put, ALIVE, b"", lifetime_s=45.0)
            await asyncio.sleep(15)

    found: dict[str, list[float]] = {}
    living = asyncio.create_task(alive())
    try:
        for way in ways.values():
            await way.platform.deploy([way.spec])
        await ways["parked"].turn(version)  # the first one starts from nothing
        for n in range(given.rounds):
            bare_s = await asyncio.to_thread(bare_start, api, ways["none"].context, ways["none"].spec)
            found.setdefault("bare pod", []).append(bare_s)
            turns = [("parked", "parked, same version"), ("parked", "parked, new version")]
            for key, name in [*turns, *([("none", "without an agent")] if n < given.without else [])]:
                if name == "parked, new version":
                    version = await asyncio.to_thread(next_version, exchange, version, rng)
                first_s, gone_s = await ways[key].turn(version)
                found.setdefault(name, []).append(first_s)
                found.setdefault(f"{name}: last event to no pod", []).append(gone_s)
                print(f"{name}: {first_s:.2f} s, gone after {gone_s:.2f} s", file=sys.stderr, flush=True)
    finally:
        living.cancel()
        for way in ways.values():
            await way.platform.close()
        await asyncio.to_thread(exchange.delete, "")
    return found


PAUSED, PAUSE_S = "paused", 12
RECIPE = f"""
import asyncio
from dataclasses import replace
from orchestrator.recipes.base import recipe

@recipe(paper="", advantage="grpo", loss="vanilla", aggregation="seq-mean-token-mean")
async def {PAUSED}(step):
    context = step._context
    clock = replace(context.clock, start_s=context.clock.start_s + {PAUSE_S})
    object.__setattr__(context, "clock", clock)  # the plan's step begins after the pause
    if not context.plan.keep:
        await context.fleet.not_needed("generate")  # what the step before has started ahead for this one goes
    await asyncio.sleep({PAUSE_S})  # longer than Knative's window: no function has a pod when it is over
    samples = step.generate()
    step.train("actor", samples, step.reward(samples))
"""
VARIANTS: dict[str, Any] = {
    "zero": {"policy": "static"},
    "ahead": {"policy": "adaptive", "objective": "speed"},
    "warm": {"policy": "static", "keep_warm": True},
}


def steps(given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    headers = {"Authorization": f"Bearer {given.token}"}
    with httpx.Client(base_url=given.api, headers=headers, timeout=600) as client:
        (given.job.parent / f"{PAUSED}.py").write_text(RECIPE)
        for name, planner in VARIANTS.items():
            own = {"recipe": f"{PAUSED}.py:{PAUSED}", "name": name, "steps": given.steps, "planner": planner}
            job = json.loads(given.job.read_text()) | own
            send_files(client, job, given.job.parent)
            answer = client.post("/v1/jobs", json=job)
            if answer.status_code != 201:
                raise SystemExit(answer.text)
            id = answer.json()["id"]
            while (state := client.get(f"/v1/jobs/{id}").json())["state"] not in ENDED:
                time.sleep(1)
            if state["state"] != "succeeded":
                raise SystemExit(f"{id}: {state['message']}")
            cost = client.get(f"/v1/jobs/{id}/cost").json()
            metrics = client.get(f"/v1/jobs/{id}/metrics").json()["metrics"]
            found[name] = {
                "step_s": [seconds - PAUSE_S for seconds in metrics["timing_s/step"]],
                "functions": cost["functions"],
                "timing": {key: value for key, value in metrics.items() if key.startswith("timing_s/")},
            }
            print(f"{name}: {found[name]['step_s']}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("sample")
    one.add_argument("--exchange", required=True)
    one.add_argument("--ingress")
    one.add_argument("--namespace", default="rlhf-test")
    one.add_argument("--release", default="parked")
    one.add_argument("--layers", type=int, default=13)
    one.add_argument("--rounds", type=int, default=10)
    one.add_argument("--without", type=int, default=3, help="rounds with a turn without an agent")
    one.add_argument("--tokens", type=int, default=8)
    two = what.add_parser("step")
    two.add_argument("--api", required=True)
    two.add_argument("--token", required=True)
    two.add_argument("--job", type=Path, required=True, help="a job as JSON, its files beside it")
    two.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    if given.what == "sample":
        with tempfile.TemporaryDirectory() as name:
            figures = asyncio.run(samples(given, Path(name)))
        for name, seconds in figures.items():
            print(f"{name:45} median {statistics.median(seconds):6.2f} s of {', '.join(f'{s:.2f}' for s in seconds)}")
        print(json.dumps(figures))
    else:
        found = steps(given)
        medians = {name: statistics.median(one["step_s"][2:]) for name, one in found.items()}
        for name, seconds in medians.items():
            print(f"{name:8} {seconds:7.2f} s a step, {seconds / medians['warm']:5.2f} of warm")
        print(json.dumps(found))


if __name__ == "__main__":
    main()
