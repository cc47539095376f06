"""What parking saves: a step whose functions are all at zero between their stages, and a trainer's way to its gradient.

    python bench/parked.py [--steps 6] [--millions 100]

step      the arithmetic example on the local platform, `planner.policy = "static"`: every replica is let go when its
          stage is done. `zero`: it ends (platform.parked_gb = 0). `parked`: its process parks, and the next start takes
          it. `warm`: it stays (planner.keep_warm). Medians after two steps.
trainer   a random Llama of so many parameters in bfloat16 with float32 masters and moments (14 bytes a parameter): from
          scaling its function from zero to the moment when everything is loaded and the first forward pass begins, from
          a directory's exchange and from a parked process.
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
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.jobs import run_job  # noqa: E402
from functions.base.samples import Columns, Finish, Ragged, SampleBatch  # noqa: E402
from functions.base.wire import Call, Version  # noqa: E402
from functions.exchange.directory import DirectoryExchange  # noqa: E402
from functions.weights.base import import_model  # noqa: E402
from orchestrator.platforms.base import FunctionSpec  # noqa: E402
from orchestrator.platforms.local import LocalPlatform  # noqa: E402

VARIANTS = {
    "zero": ["platform.parked_gb=0"],
    "parked": [],
    "warm": ["planner.keep_warm=true"],
}
MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from functions.models.pretrained import save_model
layers = int(sys.argv[2])
config = LlamaConfig(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers,
    num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
save_model(LlamaForCausalLM(config).to(torch.bfloat16), sys.argv[1])
"""
PER_LAYER, EMBEDDING = 6.3e6, 24.6e6


def steps(folder: Path, count: int) -> dict[str, float]:
    example = ROOT / "examples" / "arithmetic"
    found = {}
    for name, settings in VARIANTS.items():
        more = [f"steps={count}", "planner.policy=static", "validation.every=0", *settings]
        job = run_job(example / "job.toml", folder / name, more, timeout_s=600)
        found[name] = statistics.median(step.wall_s for step in job.steps[1:])
    return found


async def trainer(folder: Path, millions: float) -> dict[str, float]:
    layers = max(1, round((millions * 1e6 - EMBEDDING) / PER_LAYER))
    subprocess.run([sys.executable, "-c", MODEL, str(folder / "model"), str(layers)], check=True, cwd=ROOT)
    root = folder / "trainer"
    exchange = DirectoryExchange(root / "job")
    base = import_model(exchange, "actor", folder / "model")
    found = {}
    for name, parked_gb in (("exchange", 0.0), ("parked", None)):
        platform = LocalPlatform(str(root), "job", log_dir=root / "logs", parked_gb=parked_gb)
        try:
            await platform.deploy([FunctionSpec("train", "train", {"device": "cpu"}, cpus=2)])
            version = base
            for step in range(3):
                begun_s = time.monotonic()
                await platform.scale("train", 1)
                version, own_s = await call(platform, exchange, version, f"{name}-{step}")
                seconds = time.monotonic() - begun_s - own_s
                await platform.scale("train", 0)
                while platform.replicas():
                    await asyncio.sleep(0.001)
            found[name] = seconds
        finally:
            await platform.close()
    return found


async def call(
    platform: LocalPlatform, exchange: DirectoryExchange, version: Version, name: str
) -> tuple[Version, float]:
    """The version that was made, and what the call took after everything was loaded."""
    prompts = SampleBatch.of_prompts([[5, 6, 7], [8, 9]], samples_per_prompt=2, version=version.number)
    batch = SampleBatch(
        prompts=prompts.prompts, prompt=prompts.prompt, group=prompts.group, index=prompts.index,
        responses=Ragged(np.arange(16, dtype=np.int32) + 3, np.full(4, 4, np.int32)),
        logprobs=np.full(16, -1.0, np.float32), mask=np.ones(16, np.float32), finish=np.full(4, Finish.STOP, np.int32),
        version=np.full(4, version.number, np.int32),
    )  # fmt: skip
    columns = Columns.of(batch, sample={"score": np.arange(4, dtype=np.float32)})
    inputs = {"samples": [exchange.put(f"in/{name}.s", batch.encode())]}
    inputs["columns"] = [exchange.put(f"in/{name}.c", columns.encode())]
    params = {"model": "actor", "dtype": "bfloat16", "max_rollout_logprob_diff": "off"}
    meter: dict[str, Any] = {}
    async for event in platform.call("train", Call(name, "train", inputs, {"policy": version}, params)):
        meter = event.data.get("meter", meter)
        last = event
    own_s = sum(s["stop_s"] - s["start_s"] for s in meter["spans"] if s["parent"] and s["name"] in ("train", "publish"))
    return Version.from_json(last.data["version"]), own_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--millions", type=float, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        walls = steps(folder, given.steps) if given.steps else {}
        loads = asyncio.run(trainer(folder, given.millions)) if given.millions else {}
    for variant, seconds in walls.items():
        print(f"step, {variant:8} {seconds:7.3f} s   {seconds / walls['warm']:5.2f} of warm")
    for variant, seconds in loads.items():
        print(f"trainer, {variant:8} {seconds:7.3f} s   {seconds / loads['exchange']:5.2f} of the exchange's")
    print(json.dumps({"step_s": walls, "trainer_s": loads}))


if __name__ == "__main__":
    main()
