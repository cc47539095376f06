"""From zero to the first event and the first sample: what a function costs to start, part by part.

    python bench/cold_start.py [--repeats 9]

A `generate` replica with a tiny random model (Qwen2 architecture, 4 layers, hidden 256, 3.2 M parameters), one prompt,
on the local platform; with the node agent and without. Every start is from zero: no process of the function exists.

    process    scale(1) until the process exists (fork, or exec)
    started    until the first event: the server answers
    sample     until the first sample: torch at hand, weights fetched and loaded, prompt prefilled, 1 token decoded
    again      the same call on the replica that is now warm, from request to first sample
    gone       scale(0) until the process is gone

Medians; milliseconds of wall time, and CPU milliseconds of the replica from its start to the first sample, which other
work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from functions.base.samples import SampleBatch
from functions.base.wire import Call, Ref, Version
from functions.exchange.directory import DirectoryExchange
from functions.weights.base import import_model
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform

PARTS = ("process", "started", "sample", "again", "gone", "cpu")
KINDS = ("generate", "reference", "reward", "train")


def make_model(directory: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from functions.models.pretrained import save_model

    config = Qwen2Config(
        vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    save_model(Qwen2ForCausalLM(config), directory)


def cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> dict[str, float]:
    """Resident, and the share that is its own (pages shared with others divided among them)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return {"rss_mb": kb["Rss"] / 1e3, "pss_mb": kb["Pss"] / 1e3, "private_mb": kb["Private_Dirty"] / 1e3}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Bench:
    def __init__(self, platform: LocalPlatform, samples: Ref, version: Version) -> None:
        self.platform, self.samples, self.version = platform, samples, version

    async def call(self) -> dict[str, float]:
        """PlanClock of `started` and of the first sample."""
        params = {"max_response_length": 1, "ignore_eos": True, "chunk": 1}
        inputs = {"samples": [self.samples]}
        call = Call(str(uuid.uuid4()), "generate", inputs, {"policy": self.version}, params)
        at: dict[str, float] = {}
        async for event in self.platform.call("generate", call):
            at.setdefault(event.kind, time.perf_counter())
            if event.kind == "error":
                raise RuntimeError(event.data["message"])
        return at

    async def start(self) -> tuple[dict[str, float], int]:
        """One start from zero; parts in ms, and the replica's pid."""
        begun = time.perf_counter()
        await self.platform.scale("generate", 1)
        calling = asyncio.create_task(self.call())
        while self.platform.replicas()[0].state == "starting":
            await asyncio.sleep(0.0005)
        process = time.perf_counter()
        at = await calling
        replica = self.platform.processes()["generate"][0]
        cpu = cpu_ms(replica)
        again = time.perf_counter()
        second = await self.call()
        return {
            "process": 1e3 * (process - begun),
            "started": 1e3 * (at["started"] - begun),
            "sample": 1e3 * (at["samples"] - begun),
            "again": 1e3 * (second["samples"] - again),
            "cpu": cpu,
        }, replica

    async def stop(self) -> None:
        await self.platform.scale("generate", 0)
        while self.platform.replicas():
            await asyncio.sleep(0.0005)


async def measure(root: Path, samples: Ref, version: Version, *, warm_parent: bool, repeats: int) -> dict[str, object]:
    specs = [FunctionSpec(k, k, {"engine": "torch"} if k == "generate" else {}) for k in KINDS]
    platform = LocalPlatform(str(root), "job", log_dir=root / "logs", warm_parent=warm_parent, parked_gb=0)
    try:
        begun = time.perf_counter()
        await platform.deploy(specs)
        bench = Bench(platform, samples, version)
        _, replica = await bench.start()  # the parent has to load first
        ready_s = time.perf_counter() - begun
        memory = memory_mb(replica)
        await bench.stop()
        runs = []
        for _ in range(repeats):
            parts, _ = await bench.start()
            going = time.perf_counter()
            await bench.stop()
            runs.append(parts | {"gone": 1e3 * (time.perf_counter() - going)})
        result: dict[str, object] = {part: round(statistics.median(r[part] for r in runs), 1) for part in PARTS}
        result["replica"] = {k: round(v, 1) for k, v in memory.items()}
        if warm_parent:
            [parent] = children(os.getpid())
            assert children(parent) == [], "with nothing running, the agent is the only process"
            result["parent"] = {k: round(v, 1) for k, v in memory_mb(parent).items()}
            result["first_s"] = round(ready_s, 2)
        return result
    finally:
        await platform.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root / "model")
        exchange = DirectoryExchange(str(root / "job"))
        version = import_model(exchange, "policy", root / "model")
        batch = SampleBatch.of_prompts([list(range(2, 66))], samples_per_prompt=1, version=0)
        samples = exchange.put("batches/one", batch.encode())
        results = {
            "warm parent": asyncio.run(measure(root, samples, version, warm_parent=True, repeats=repeats)),
            "fresh": asyncio.run(measure(root, samples, version, warm_parent=False, repeats=max(3, repeats // 3))),
        }
    print(f"{'ms':12s}" + "".join(f"{part:>10s}" for part in PARTS))
    for name, result in results.items():
        print(f"{name:12s}" + "".join(f"{result[part]:10.1f}" for part in PARTS))
    parent, replica = results["warm parent"]["parent"], results["warm parent"]["replica"]
    print(f"warm parent {parent}; a replica beside it {replica}")
    print(json.dumps({"bench": "cold_start", "repeats": repeats, "load": os.getloadavg()[0], **results}))


if __name__ == "__main__":
    main()
