"""Versions as torch tensors, and back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from functions.base.wire import Version
from functions.exchange.base import Exchange
from functions.weights.blobs import Blob
from functions.weights.manifest import Manifest, TensorEntry, read_manifest
from functions.weights.ranges import Range, read_blobs, read_ranges

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By the names that manifests have for them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def blobs(tensors: Mapping[str, Tensor] | Mapping[str, Blob]) -> dict[str, Blob]:
    """The bytes of tensors, where they are given as tensors. ValueError for a dtype that has no stored form."""
    return {name: tensor if isinstance(tensor, Blob) else whole_blob(name, tensor) for name, tensor in tensors.items()}


def fetch(exchange: Exchange, version: Version) -> dict[str, Tensor]:
    """The version's own tensors (of a LoRA version the adapters) on the CPU, hashes checked.

    Raises NotFound for a version not published, Corrupt naming version and tensor for altered bytes.
    """
    manifest = read_manifest(exchange, version)
    found = read_blobs(exchange, manifest, manifest.tensors)
    return {entry.name: _tensor(entry, entry.shape, data) for entry, data in found}


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
