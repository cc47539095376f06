"""Training to generation: what each rank of a replica that generates reads of a version, by who wrote it.

python bench/resharding.py [--meshes 1 2 2:tp2 2:pp2 4:tp2:pp2] [--ranks 1 2 4] [--hidden 256] [--layers 8]

Gangs of processes make a step from the same version over gloo, each under its mesh (ranks:tp:pp, the rest is dp), and
write one; then a vLLM replica of t_g ranks takes them one after the other, each rank its slices (t_g = 1: the whole).
Bytes are those that the ranks themselves count, blocks included. HybridFlow (arXiv:2409.19256, table 2) counts what
reaches a rank that trains as well, and has its part: (t p - t_g) / (t_g t p) M. Ranks here begin with nothing: M / t_g.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gang_bytes import PROCESSES, inputs, make_model, step
from functions.base.wire import Call, Json, Version
from functions.call.function import Context
from functions.exchange.open import open_exchange
from functions.generate.engines import EngineOptions
from functions.generate.policy import HeldPolicy
from functions.generate.vllm.engine import VllmEngine
from functions.weights.base import import_model
from functions.weights.manifest import read_manifest


def read_by(ranks: int, versions: Sequence[Version], root: Path, scratch: Path) -> list[list[int]]:
    """Bytes that each rank of a replica reads for each of the versions, taken in turn."""
    exchange = open_exchange(str(root), "job")
    settings = {"gpus": ranks, "context": 256}
    policy = HeldPolicy("vllm", EngineOptions(torch.bfloat16, torch.device("cpu"), 8, False, settings))
    found = []
    for version in versions:
        context = Context(exchange, str(scratch), opened=(str(root), "job"))
        engine, _ = policy.hold(version, context)
        assert isinstance(engine, VllmEngine)
        manifest = read_manifest(exchange, version)
        found.append(engine.read_bytes if ranks > 1 else [sum(entry.size_bytes for entry in manifest.tensors)])
    engine.close()
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["1", "2", "2:tp2", "2:pp2", "4:tp2:pp2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args(given)
    PROCESSES.set_forkserver_preload(["functions.train.function"])
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as name:
        root, scratch = Path(name) / "exchange", Path(name) / "scratch"
        exchange = open_exchange(str(root), "job")
        make_model(Path(name) / "model", options.hidden, options.layers)
        base = import_model(exchange, "policy", Path(name) / "model")
        params: Json = {"optimizer": {"lr": 1e-2}, "dtype": "bfloat16", "max_rollout_logprob_diff": "off"}
        versions = []
        for mesh in options.meshes:
            call = Call(f"by-{mesh}".replace(":", "-"), "train", inputs(exchange, 0), {"policy": base}, params)
            versions.append(step(root / "job", scratch, call, mesh)[0])
            print(f"written by {mesh}", flush=True)
        size = sum(entry.size_bytes for entry in read_manifest(exchange, versions[0]).tensors)
        print(f"\nM = {size:,} bytes\n")
        print(f"{'written by':>12} {'t_g':>4} {'a rank reads':>23} {'of M / t_g':>15} {'HybridFlow':>11}")
        for ranks in options.ranks:
            for mesh, read in zip(options.meshes, read_by(ranks, versions, root, scratch), strict=True):
                over = [round(own * ranks / size, 4) for own in read]
                bound = max(0, size // ranks - size // _model_parallel(mesh))
                told = f"{min(read):>11,} {max(read):>11,} {min(over):>7} {max(over):>7}"
                print(f"{mesh:>12} {ranks:>4} {told} {bound:>11,}", flush=True)
                rows.append({"mesh": mesh, "ranks": ranks, "read": read, "over_bound": over})
    print(json.dumps({"bench": "resharding", "weights": size, "rows": rows}))


def _model_parallel(mesh: str) -> int:
    """t p of a mesh."""
    return math.prod(int(axis[2:]) for axis in mesh.split(":")[1:])


if __name__ == "__main__":
    main()
