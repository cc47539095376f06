"""A new version for a replica that is kept: fetched whole, and as a delta, by how many of its weights changed.

    python bench/weights_delta.py [--layers 24] [--density 0.001 0.01 0.1 0.3 1.0] [--load]

The model has the shapes of Qwen2.5-0.5B in bfloat16 (494 million weights, tied head; --layers makes it smaller) and
random weights; the changed ones lie at random, each with its lowest bit flipped. The exchange is a directory: its
reads come from this machine's memory, so the seconds are those of the work around a fetch, and what a network adds is
in the bytes. `compare` is what the trainer pays to find the changes and encode them, its check of the old bytes
included. With --load also the seconds in which the torch engine loads the files, the same for both ways.

The second table is of encodings of the positions, in bytes for each changed weight, its 2 bytes of value included.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from functions.base.wire import Ref, Version
from functions.exchange.base import Exchange
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import checkpoint_tensors
from functions.weights.base import put_files
from functions.weights.blobs import Blob, publish_blobs
from functions.weights.delta import difference, encode_gaps
from functions.weights.local_copy import LocalCopy
from functions.weights.store import blobs

SHAPE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


class Counted(DirectoryExchange):
    """Counts the bytes that are read."""

    read = 0

    @property
    def durable(self) -> Exchange:
        return self

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start=start, length=length)
        self.read += len(data)
        return data


@dataclass(frozen=True)
class Took:
    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Row:
    density: float
    way: str
    compare: Took
    whole: Took
    whole_mb: float
    kept: Took
    kept_mb: float
    load: Took | None


def quiet(_name: str) -> AbstractContextManager[None]:
    return nullcontext()


T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[Took, T]:
    gc.collect()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = work()
    return Took(time.process_time() - cpu_s, time.perf_counter() - wall_s), result


def flipped(old: Mapping[str, Blob], density: float, rng: np.random.Generator) -> dict[str, Blob]:
    new = {}
    for name, blob in old.items():
        data = np.frombuffer(blob.data, np.uint16).copy()
        data ^= (rng.random(len(data), np.float32) < density).astype(np.uint16)
        new[name] = Blob(blob.dtype, blob.shape, data.view(np.uint8).data)
    return new


def measure(density: float, old: Mapping[str, Blob], config: bytes, folder: Path, load: bool) -> Row:
    exchange, rng = Counted(folder / "exchange"), np.random.default_rng(0)
    base, version = Version("policy", 0), Version("policy", 1, "c")
    files = put_files(exchange, base, {"config.json": config})
    parent = publish_blobs(exchange, base, tensors=old, state={}, trainer={}, files=files, parent=None)
    kept, new = LocalCopy(folder / "kept"), LocalCopy(folder / "new")
    kept.bring(exchange, base, quiet)
    tensors = flipped(old, density, rng)
    compare, change = timed(lambda: difference(parent, old, tensors))
    assert change is not None
    publish_blobs(
        exchange, version, tensors=tensors, state={}, trainer={}, files=files, parent=base, delta=change.parts
    )
    exchange.read = 0
    whole, _ = timed(lambda: new.bring(exchange, version, quiet))
    whole_bytes, exchange.read = exchange.read, 0
    kept_took, arrival = timed(lambda: kept.bring(exchange, version, quiet))
    kept_bytes, loading = exchange.read, None
    if load:
        loading, _ = timed(lambda: _engine_load(arrival.directory))
    way = "whole" if arrival.changes is None else "delta"
    share = change.changed / max(change.elements, 1)
    return Row(share, way, compare, whole, whole_bytes / 1e6, kept_took, kept_bytes / 1e6, loading)


def _engine_load(directory: Path) -> None:
    from functions.generate.torch.engine import TorchEngine

    engine = TorchEngine(dtype=torch.bfloat16, device=torch.device("cpu"), slots=8, deterministic=False)
    engine.load(Version("policy", 1, "c"), directory)


def encodings(density: float, elements: int = 4_000_000) -> dict[str, float]:
    """Bytes a changed weight of each encoding, at random positions."""
    rng = np.random.default_rng(1)
    positions = np.flatnonzero(rng.random(elements) < density)
    values = (rng.normal(0, 0.02, len(positions)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    gaps, raw = encode_gaps(positions), values.tobytes()
    sizes = {
        "int32 positions": 4 * len(positions) + len(raw),
        "bitmap": elements / 8 + len(raw),
        "gaps, 1 byte": _escaped(positions, 255) + len(raw),
        "gaps, 2 bytes": 2 * _escaped(positions, 65535) + len(raw),
        "gaps, LEB128": len(gaps) + len(raw),
        "LEB128, zlib": len(zlib.compress(gaps, 1)) + len(zlib.compress(raw, 1)),
    }
    return {name: size / len(positions) for name, size in sizes.items()}


def _escaped(positions: npt.NDArray[np.int64], limit: int) -> int:
    """Entries where a gap of `limit` or more takes one entry for each whole `limit` in it, and one more."""
    gaps = np.diff(positions, prepend=-1) - 1
    return int((gaps // limit + 1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.1, 0.3, 1.0])
    parser.add_argument("--load", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_hidden_layers=options.layers))
    torch.nn.Module.to(model.to_empty(device="cpu"), torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.copy_((torch.rand_like(parameter, dtype=torch.float32) - 0.5) / 15)
    old = blobs(checkpoint_tensors(model))
    config = json.dumps(model.config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}).encode()
    size_mb = sum(len(blob.data) for blob in old.values()) / 1e6
    print(f"{size_mb:.0f} MB of bfloat16 weights in {len(old)} tensors")
    print("CPU seconds (wall seconds):")
    print(f"{'changed':>8} {'compare':>13} {'whole':>13} {'MB':>7} {'kept':>13} {'MB':>7} {'':5} {'load':>13}")
    rows = []
    for density in options.density:
        folder = Path(tempfile.mkdtemp(prefix="weights-delta-"))
        try:
            row = measure(density, old, config, folder, options.load)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows.append(row)
        took = [f"{t.cpu_s:5.2f} ({t.wall_s:5.2f})" for t in (row.compare, row.whole, row.kept, row.load) if t]
        figures = f"{row.density:8.2%} {took[0]:>13} {took[1]:>13} {row.whole_mb:7.1f} {took[2]:>13} {row.kept_mb:7.1f}"
        print(f"{figures} {row.way} {took[3] if row.load else '':>13}", flush=True)
    table = {density: encodings(density) for density in options.density if density < 1}
    names = list(next(iter(table.values())))
    print("\nbytes a changed weight " + " ".join(f"{name:>16}" for name in names))
    for density, sizes in table.items():
        print(f"{density:22.1%} " + " ".join(f"{sizes[name]:16.2f}" for name in names))
    print(json.dumps({
        "bench": "weights_delta", "model_mb": size_mb, "rows": [asdict(row) for row in rows],
        "encodings": {str(density): sizes for density, sizes in table.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
