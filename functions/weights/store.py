"""Versions as torch tensors: publish and fetch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from functions.base.wire import Json, Version
from functions.exchange.base import Exchange
from functions.weights.base import put_files
from functions.weights.blobs import Blob, publish_blobs
from functions.weights.manifest import Adapter, Manifest, TensorEntry, label, read_manifest
from functions.weights.ranges import Range, read_blobs, read_ranges

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By the names that manifests have for them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def publish(
    exchange: Exchange,
    version: Version,
    *,
    tensors: Mapping[str, Tensor] | Mapping[str, Blob],
    state: Mapping[str, Tensor],
    trainer: Json,
    model_files: Mapping[str, bytes] | None,
    parent: Version | None,
    adapter: Adapter | None = None,
    delta: Sequence[bytes] = (),
) -> Manifest:
    """Publishes a version: weights (with `adapter`: the adapters alone), the optimizer's `state` and the `trainer`'s
    JSON under one manifest.

    The data goes first, the manifest last, with a conditional put: of several publishers of one version one wins, and
    all return the winner's manifest. `model_files` (config.json, tokenizer.json, ...) None takes over the parent's.
    Raises ValueError for a version without a parent and without files, and for a dtype that has no stored form.
    """
    if model_files is not None:
        files = put_files(exchange, version, model_files)
    elif parent is not None:
        files = dict(read_manifest(exchange, parent).files)
    else:
        raise ValueError(f"weights {label(version)}: neither model_files nor a parent that has them")
    return publish_blobs(
        exchange,
        version,
        tensors=blobs(tensors),
        state=blobs(state),
        trainer=trainer,
        files=files,
        parent=parent,
        adapter=adapter,
        delta=delta,
    )


def blobs(tensors: Mapping[str, Tensor] | Mapping[str, Blob]) -> dict[str, Blob]:
    """The bytes of tensors, where they are given as tensors. ValueError for a dtype that has no stored form."""
    return {name: tensor if isinstance(tensor, Blob) else whole_blob(name, tensor) for name, tensor in tensors.items()}


def fetch(exchange: Exchange, version: Version, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The version's own tensors (those of `names`, else all; of a LoRA version the adapters) on the CPU, hashes
    checked; only their bytes are read.

    Raises NotFound for a version not published, Corrupt naming version and tensor for altered bytes, KeyError for a
    name that the version lacks.
    """
    manifest = read_manifest(exchange, version)
    return _read(exchange, manifest, _named(manifest, manifest.tensors, names))


def fetch_state(exchange: Exchange, version: Version, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The optimizer's state, as `fetch` does it for the weights."""
    manifest = read_manifest(exchange, version)
    return _read(exchange, manifest, _named(manifest, manifest.state, names))


def _named(manifest: Manifest, entries: Iterable[TensorEntry], names: Collection[str] | None) -> Iterable[TensorEntry]:
    if names is None:
        return entries
    known = {entry.name: entry for entry in entries}
    missing = sorted(set(names) - set(known))
    if missing:
        raise KeyError(f"weights {label(manifest.version)}: no tensor {missing[0]!r}")
    return [known[name] for name in names]


def _read(exchange: Exchange, manifest: Manifest, entries: Iterable[TensorEntry]) -> dict[str, Tensor]:
    return {entry.name: _tensor(entry, entry.shape, data) for entry, data in read_blobs(exchange, manifest, entries)}


def fetch_rows(
    exchange: Exchange, manifest: Manifest, rows: Iterable[tuple[TensorEntry, int, int]]
) -> Iterator[tuple[str, Tensor]]:
    """Of each entry the rows from the first number to the second (along dimension 0), with its name; only the blocks
    that hold them are read, and all of these are checked. Raises Corrupt as `fetch` does."""
    wanted = []
    for entry, low, high in rows:
        row_bytes = entry.size_bytes // max(1, entry.rows)
        wanted.append(Range(entry, low * row_bytes, high * row_bytes))
    for part, data in read_ranges(exchange, manifest, wanted):
        row_bytes = part.entry.size_bytes // max(1, part.entry.rows)
        count = len(data) // row_bytes if row_bytes else 0
        yield part.entry.name, _tensor(part.entry, (count, *part.entry.shape[1:]) if part.entry.shape else (), data)


def _tensor(entry: TensorEntry, shape: Sequence[int], data: memoryview) -> Tensor:
    tensor = torch.empty(tuple(shape), dtype=DTYPES[entry.dtype])
    tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


def whole_blob(name: str, tensor: Tensor) -> Blob:
    """The bytes of a tensor. ValueError for a dtype that has no stored form."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return Blob(stored_dtype(name, tensor.dtype), tuple(tensor.shape), flat.numpy().data)


def stored_dtype(name: str, dtype: torch.dtype) -> str:
    """ValueError for one that has no stored form."""
    if dtype not in _NAMES:
        known = ", ".join(_NAMES.values())
        raise ValueError(f"tensor {name!r}: dtype {dtype} has no stored form; known are {known}")
    return _NAMES[dtype]
