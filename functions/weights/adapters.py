"""Adapters: merged into the weights of their base version with numpy alone, or as PEFT's files. No torch here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from functions.exchange.base import Corrupt, Exchange
from functions.weights.files import encode_header
from functions.weights.manifest import Adapter, Manifest, TensorEntry, label, read_manifest
from functions.weights.ranges import read_blobs

Bytes = bytes | memoryview
PREFIX = "base_model.model."
"""Before the layer's name in the names of adapter tensors, as peft has it."""


def merger(exchange: Exchange, manifest: Manifest, adapter: Adapter) -> Callable[[TensorEntry, Bytes], Bytes]:
    """What turns the bytes of a tensor of the base into those of W + (alpha / rank) B A; others stay as they are.

    Raises Corrupt for an adapter on a layer that the base does not have.
    """
    parts: dict[str, npt.NDArray[np.float32]] = {}
    for entry, data in read_blobs(exchange, manifest, manifest.tensors):
        parts[entry.name] = _decode(entry, data)
    layers = {name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in parts if ".lora_A." in name}
    known = {entry.name for entry in read_manifest(exchange, adapter.base).tensors}
    for layer in sorted(layers):
        if f"{layer}.weight" not in known:
            raise Corrupt(f"weights {label(manifest.version)}: an adapter on {layer!r}, which its base does not have")

    def change(entry: TensorEntry, data: Bytes) -> Bytes:
        layer = entry.name.removesuffix(".weight")
        if layer not in layers:
            return data
        low, high = parts[f"{PREFIX}{layer}.lora_A.weight"], parts[f"{PREFIX}{layer}.lora_B.weight"]
        merged = _decode(entry, data) + np.float32(adapter.alpha / adapter.rank) * (high @ low)
        return _encode(entry, merged)

    return change


def write_adapter(exchange: Exchange, manifest: Manifest, directory: Path, base: str) -> Path:
    """A published LoRA version as a PEFT directory; `base` is the base model's directory or id of the Hub.

    Raises Corrupt as materialize does.
    """
    assert manifest.adapter is not None
    directory.mkdir(parents=True, exist_ok=True)
    entries = manifest.tensors
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(encode_header((e.name, e.dtype, e.shape, e.size_bytes) for e in entries))
        data = {entry.name: data for entry, data in read_blobs(exchange, manifest, entries)}
        for entry in entries:
            file.write(data[entry.name])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": manifest.adapter.rank,
        "lora_alpha": manifest.adapter.alpha,
        "target_modules": list(manifest.adapter.targets),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _decode(entry: TensorEntry, data: Bytes) -> npt.NDArray[np.float32]:
    flat: npt.NDArray[Any]
    match entry.dtype:
        case "F32":
            flat = np.frombuffer(data, np.float32)
        case "F16":
            flat = np.frombuffer(data, np.float16).astype(np.float32)
        case "BF16":
            flat = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        case _:
            raise ValueError(f"tensor {entry.name!r}: adapters merge into F32, F16 and BF16, not {entry.dtype}")
    return flat.reshape(entry.shape)


def _encode(entry: TensorEntry, values: npt.NDArray[np.float32]) -> bytes:
    match entry.dtype:
        case "F32":
            return values.astype(np.float32).tobytes()
        case "F16":
            return values.astype(np.float16).tobytes()
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return rounded.astype(np.uint16).tobytes()
