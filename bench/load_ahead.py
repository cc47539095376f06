"""From a call to its first sample on a replica that started `gap` seconds before it, with a hint and without.

    python bench/load_ahead.py [--engines torch vllm] [--parents warm fresh] [--gaps 0 20] [--rounds 3] [--hidden 896]

One `generate` replica on the local platform, from zero each time, forked from the node agent or as a fresh process;
one prompt of 64 tokens, one token; a random Qwen2 model of Qwen2.5-0.5B's shapes, in float32, whose version lies in a
directory exchange. The replica is asked for, the call is made `gap` seconds later; turns with and without a hint
follow each other, so that other work on the machine disturbs both alike. Medians of wall seconds:

    sample_s         from the call to its first sample, what a step waits; its ratio is without / with
    load_s           of it, the weights (functions/server/preload.py)
    loaded_ahead_s   loading that was done when the call came
    cpu_s            CPU of the replica until the sample: with the hint no more is done, it is done sooner
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
from functions.base.wire import Call, Hint, Load, Ref, Version, hint_key
from functions.exchange.directory import DirectoryExchange
from functions.weights.base import import_model
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform

PARTS = ("sample_s", "load_s", "loaded_ahead_s", "cpu_s")


def make_model(directory: Path, hidden: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from functions.models.pretrained import save_model

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=hidden * 38 // 7, num_hidden_layers=24,
        num_attention_heads=hidden // 64, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    save_model(Qwen2ForCausalLM(config), directory)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def start_and_call(platform: LocalPlatform, version: Version, samples: Ref, gap_s: float) -> dict[str, float]:
    """One start from zero, and its first call."""
    params = {"max_response_length": 1, "ignore_eos": True, "chunk": 1}
    call = Call(str(uuid.uuid4()), "generate", {"samples": [samples]}, {"policy": version}, params)
    await platform.scale("generate", 1)
    await asyncio.sleep(gap_s)
    begun_s = time.perf_counter()
    found: dict[str, float] = {}
    async for event in platform.call("generate", call):
        if event.kind == "samples":
            [pid] = platform.processes()["generate"]
            found |= {"sample_s": time.perf_counter() - begun_s, "cpu_s": cpu_s(pid)}
        elif event.kind == "error":
            raise SystemExit(event.data["message"])
        elif event.kind == "done":
            found |= {name: event.data[name] for name in ("load_s", "loaded_ahead_s")}
    await platform.scale("generate", 0)
    while platform.replicas():
        await asyncio.sleep(0.01)
    return found


async def measure(
    root: Path, engine: str, parent: str, gap_s: float, rounds: int, version: Version, samples: Ref
) -> dict[str, dict[str, float]]:
    exchange = DirectoryExchange(str(root / "job"))
    hint = json.dumps(Hint(0, [Load("generate", {"policy": version})]).to_json()).encode()
    options = {"engine": engine} | ({"vllm": {"context": 256}} if engine == "vllm" else {})
    platform = LocalPlatform(str(root), "job", log_dir=root / "logs", warm_parent=parent == "warm", parked_gb=0)
    runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    try:
        await platform.deploy([FunctionSpec("generate", "generate", options)])
        for number in range(rounds + 1):
            for name in list(runs)[:: 1 if number % 2 else -1]:  # each goes first as often
                if name == "with":
                    exchange.put(hint_key("generate"), hint)
                took = await start_and_call(platform, version, samples, gap_s if number else 0.0)
                exchange.delete(hint_key("generate"))
                if number:  # before, the parent and the machine's caches warm up
                    runs[name].append(took)
    finally:
        await platform.close()
    return {name: {p: statistics.median(r[p] for r in found) for p in PARTS} for name, found in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["torch"], choices=["torch", "transformers", "vllm"])
    parser.add_argument("--parents", nargs="+", default=["warm", "fresh"], choices=["warm", "fresh"])
    parser.add_argument("--gaps", nargs="+", type=float, default=[0.0, 20.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=896)
    given = parser.parse_args()
    rows = []
    print(
        f"{'engine':8s}{'parent':8s}{'gap':>6s}{'':10s}" + "".join(f"{part:>16s}" for part in PARTS) + f"{'ratio':>8s}"
    )
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root / "model", given.hidden)
        exchange = DirectoryExchange(str(root / "job"))
        version = import_model(exchange, "policy", root / "model")
        batch = SampleBatch.of_prompts([list(range(2, 66))], samples_per_prompt=1, version=0)
        samples = exchange.put("batches/one", batch.encode())
        for engine in given.engines:
            for parent in given.parents:
                for gap_s in given.gaps:
                    found = asyncio.run(measure(root, engine, parent, gap_s, given.rounds, version, samples))
                    ratio = found["without"]["sample_s"] / found["with"]["sample_s"]
                    for name, medians in found.items():
                        cells = "".join(f"{medians[part]:16.3f}" for part in PARTS)
                        shown = f"{ratio:8.1f}" if name == "with" else ""
                        print(f"{engine:8s}{parent:8s}{gap_s:6.0f}{name:>10s}{cells}{shown}", flush=True)
                    rows.append({"engine": engine, "parent": parent, "gap_s": gap_s, "ratio": ratio, **found})
    print(json.dumps({"bench": "load_ahead", "rounds": given.rounds, "load": os.getloadavg()[0], "rows": rows}))


if __name__ == "__main__":
    main()
