"""What each rank of a gang reads and writes for one train call, and the memory it takes: of several meshes.

python bench/gang_bytes.py [--meshes 1 2 4 2:tp2 4:tp2 4:tp4] [--hidden 256] [--layers 8]

A random Qwen2 in bfloat16 with float32 masters and both moments, 14 bytes a parameter in a version. Each rank is a
process; its bytes are those that the call itself tells (`bytes_in`, `bytes_out` of its trace): manifests and the batch
are included. All gangs make the same step from the same version, which one replica wrote; then all make one from the
version that the last mesh wrote. Memory: the greatest resident size of the process less what it had at the start.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Json, Version
from functions.call.meter import Told
from functions.call.parallel import Parallel
from functions.exchange.base import Exchange
from functions.exchange.directory import DirectoryExchange
from functions.server.attempt import Attempt
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from functions.weights.manifest import read_manifest
from orchestrator.calls.gang import rank_calls

VOCABULARY = 16000
PROCESSES = multiprocessing.get_context("forkserver")


def make_model(directory: Path, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)


def inputs(exchange: Exchange, version: int) -> Json:
    """Samples as if `version` had made them."""
    rng = np.random.default_rng(0)
    base = SampleBatch.of_prompts(rng.integers(3, 1000, (4, 8)).tolist(), samples_per_prompt=2, version=version)
    lengths = np.full(8, 16, np.int32)
    samples = replace(
        base,
        responses=Ragged(rng.integers(3, 1000, 128).astype(np.int32), lengths),
        logprobs=np.full(128, -9.0, np.float32),
        mask=np.ones(128, np.float32),
        finish=np.full(8, Finish.STOP, np.int32),
    )
    columns = Columns.of(samples, sample={"score": rng.random(8).astype(np.float32)})
    return {
        "samples": [exchange.put(f"batches/s{version}", samples.encode())],
        "columns": [exchange.put("batches/c", columns.encode())],
    }


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def one_rank(root: str, scratch: str, call: Json, answer: Connection) -> None:
    torch.set_num_threads(1)
    before = resident("VmRSS")
    lines: list[bytes] = []
    attempt = Attempt(Call.from_json(call), lines.append)
    attempt.run(lambda: TrainFunction(device="cpu"), lambda: DirectoryExchange(root), scratch)
    events = [Event.from_line(line) for line in lines]
    if events[-1].kind != "done":
        raise SystemExit(f"the call failed: {dict(events[-1].data)}")
    told = Told.from_json(next(e.data["meter"] for e in events if "meter" in e.data))
    answer.send((told.bytes_in, told.bytes_out, resident("VmHWM") - before, events[-1].data["version"]))


def step(root: Path, scratch: Path, call: Call, mesh: str) -> tuple[Version, list[tuple[int, int, int]]]:
    """The version that a gang made, and of each rank what it read and wrote, and its memory."""
    ranks, *axes = mesh.split(":")
    size, parallel = int(ranks), Parallel(**{axis[:2]: int(axis[2:]) for axis in axes})
    calls = [call] if size == 1 else rank_calls(call, size, secrets.token_hex(4), parallel)
    started = []
    for rank, own in enumerate(calls):
        ours, theirs = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=one_rank, args=(str(root), f"{scratch}/{rank}", own.to_json(), theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    found = [ours.recv() for _, ours in started]
    for process, _ in started:
        process.join()
    return Version.from_json(found[0][3]), [(read, written, peak) for read, written, peak, _ in found]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["1", "2", "4", "2:tp2", "4:tp2", "4:tp4"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--once", action="store_true", help="from the version of one replica alone")
    options = parser.parse_args(given)
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as name:
        root, scratch = Path(name) / "exchange", Path(name) / "scratch"
        exchange = DirectoryExchange(root)
        make_model(Path(name) / "model", options.hidden, options.layers)
        base = import_model(exchange, "policy", Path(name) / "model")
        params: Json = {"optimizer": {"lr": 1e-6}, "dtype": "bfloat16", "max_rollout_logprob_diff": "off"}

        def call(identity: str, version: Version) -> Call:
            return Call(identity, "train", inputs(exchange, version.number), {"policy": version}, params)

        first, _ = step(root, scratch, call("first", base), "1")
        manifest = read_manifest(exchange, first)
        weights, state = (sum(e.size_bytes for e in kind) for kind in (manifest.tensors, manifest.state))
        print(f"weights {weights:,} bytes, optimizer's state with masters {state:,} bytes\n")
        heads = (
            ("written by", 10),
            ("mesh", 6),
            ("rank", 4),
            ("read", 13),
            ("of all", 7),
            ("written", 13),
            ("of all", 7),
        )
        print(" ".join(f"{name:>{width}}" for name, width in (*heads, ("memory", 13))))
        source = first
        for by in ("1", options.meshes[-1]):
            for mesh in options.meshes:
                version, moved = step(root, scratch, call(f"by-{by}-of-{mesh}".replace(":", "-"), source), mesh)
                for rank, (read, written, peak) in enumerate(moved):
                    shares = f"{read / (weights + state):>7.1%} {written:>13,} {written / (weights + state):>7.1%}"
                    print(f"{by:>10} {mesh:>6} {rank:>4} {read:>13,} {shares} {peak:>13,}")
                    rows.append({
                        "written_by": by, "mesh": mesh, "rank": rank, "read": read, "written": written, "memory": peak,
                    })  # fmt: skip
                if options.once or mesh != options.meshes[-1]:  # 14 bytes a parameter
                    exchange.delete(version.prefix)
            source = version
            if options.once:
                break
    print(json.dumps({"bench": "gang_bytes", "weights": weights, "state": state, "rows": rows}))


if __name__ == "__main__":
    main()
