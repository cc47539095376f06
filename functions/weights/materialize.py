"""A version as a Hugging Face directory, loadable by transformers and vLLM. No torch here."""

import json
from collections.abc import Callable
from pathlib import Path

from functions.base.wire import Version
from functions.exchange.base import Exchange
from functions.weights.adapters import Bytes, merger
from functions.weights.files import encode_header
from functions.weights.manifest import Manifest, TensorEntry, read_manifest
from functions.weights.ranges import read_blobs

FILE_BYTES = 4 * 2**30
"""Most bytes of one safetensors file of the directory."""


def materialize(exchange: Exchange, version: Version, directory: Path, *, holes: bool = False) -> Path:
    """Writes the version's files and weights into `directory` (created), and returns it. `holes`: the weights' files
    have their size and headers, but no weights, and take no room.

    The adapters of a LoRA version are merged into the weights of its base (in float32, then rounded to the base's
    dtype). Raises NotFound for a version that was not published, Corrupt for one whose bytes were altered.
    """
    manifest = read_manifest(exchange, version)
    change: Callable[[TensorEntry, Bytes], Bytes] = _nothing
    if manifest.adapter is not None:
        change = merger(exchange, manifest, manifest.adapter)
        manifest = read_manifest(exchange, manifest.adapter.base)
    write_files(exchange, manifest, directory)
    groups = _files(manifest)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
        index = {entry.name: name for name, group in zip(names, groups, strict=True) for entry in group}
        value = {"metadata": {"total_size": manifest.size_bytes}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(value))
    for name, group in zip(names, groups, strict=True):
        with (directory / name).open("wb") as file:
            header = encode_header((e.name, e.dtype, e.shape, e.size_bytes) for e in group)
            file.write(header)
            begin = {}
            at = len(header)
            for entry in group:
                begin[entry.name] = at
                at += entry.size_bytes
            file.truncate(at)
            for entry, data in () if holes else read_blobs(exchange, manifest, group):
                file.seek(begin[entry.name])
                file.write(change(entry, data))
    return directory


def write_files(exchange: Exchange, manifest: Manifest, directory: Path) -> None:
    """Configuration and tokenizer, into `directory` (created)."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, ref in manifest.files.items():
        (directory / name).write_bytes(exchange.durable.get(ref))


def _nothing(_: TensorEntry, data: Bytes) -> Bytes:
    return data


def _files(manifest: Manifest) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in manifest.tensors:
        if groups[-1] and size + entry.size_bytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.size_bytes
    return groups
