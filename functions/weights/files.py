"""Safetensors files: their header, and which files of a Hugging Face directory go with the weights. No torch here."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from functions.weights.manifest import ITEM_BYTES

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
EXPONENTS = {"F32": (0x7F800000, "<u4"), "F16": (0x7C00, "<u2"), "BF16": (0x7F80, "<u2")}
"""The bits that are all set in an infinity or a NaN, and the integer that a number is read as."""
PIECE = 1 << 20
_SUFFIXES = frozenset((".json", ".txt", ".model", ".jinja", ".tiktoken"))


@dataclass(frozen=True)
class Tensor:
    """Where a tensor's bytes lie in a file: `start` counts from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The head of a safetensors file whose tensors (name, dtype, shape, bytes) follow it end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, length in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode_header(path: Path) -> list[Tensor]:
    """The tensors of a safetensors file, in the order of their bytes. ValueError where it is none."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 0 < length <= size - 8 else b""
    try:
        header: Mapping[str, Any] = json.loads(text)
        tensors = []
        for name, value in header.items():
            if name == "__metadata__":
                continue
            begin, end = value["data_offsets"]
            tensor = Tensor(name, str(value["dtype"]), tuple(value["shape"]), 8 + length + begin, end - begin)
            who = f"{path}: tensor {name!r}"
            if tensor.dtype not in ITEM_BYTES:
                raise ValueError(f"{who} has dtype {tensor.dtype}; known are {', '.join(ITEM_BYTES)}")
            if tensor.length != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
                raise ValueError(f"{who} has {tensor.length} bytes, not those of {tensor.dtype} {list(tensor.shape)}")
            if tensor.start + tensor.length > size:
                raise ValueError(f"{who} lies outside the file; the file is truncated")
            tensors.append(tensor)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a safetensors file, or a truncated one") from error
    return sorted(tensors, key=lambda t: t.start)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face model directory; ValueError, in one line, where it is none."""
    if not directory.is_dir():
        raise ValueError(f"model {directory}: no such directory; wants a Hugging Face model directory")
    if not (directory / "config.json").is_file():
        raise ValueError(f"model {directory}: no config.json; wants a Hugging Face model directory")
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"model {directory}: config.json is not JSON ({error})") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"model {directory}: config.json names no model_type; wants that of a transformers model")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"model {directory}: {index.name} is no index of safetensors files") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (directory / name).is_file():
            found = "other formats are not read; " if list(directory.glob("*.bin")) else ""
            raise ValueError(f"model {directory}: no {name} ({found}save the model as safetensors)")
    return [directory / name for name in names]


def check_vocabulary(directory: Path, files: Iterable[Path]) -> None:
    """Raises ValueError, in one line, where config.json and the weights differ on the vocabulary, or a token that ends
    a response lies outside of it."""
    config = json.loads((directory / "config.json").read_bytes())
    text = config.get("text_config", config)
    shapes = {tensor.name: tensor.shape for path in files for tensor in decode_header(path)}
    rows = next((shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDINGS)), None)
    size = text.get("vocab_size")
    if not isinstance(size, int) or rows is None:
        return  # a model that calls them otherwise: transformers will know
    if rows != size:
        raise ValueError(f"model {directory}: config.json says vocab_size {size}, the weights have {rows} embeddings")
    generation = directory / "generation_config.json"
    found = json.loads(generation.read_bytes()) if generation.is_file() else {}
    for name, value in (("config.json", text.get("eos_token_id")), (generation.name, found.get("eos_token_id"))):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (isinstance(token, int) and 0 <= token < size):
                raise ValueError(f"model {directory}: {name}: eos_token_id {token!r} lies outside of {size} tokens")


def check_finite(directory: Path, files: Iterable[Path]) -> None:
    """Raises ValueError for weights that hold infinities or NaNs (of types that are neither float32, float16 nor
    bfloat16 it is not asked). Reads them all."""
    for path in files:
        for tensor in decode_header(path):
            if tensor.dtype not in EXPONENTS or not tensor.length:
                continue
            exponent, kind = EXPONENTS[tensor.dtype]
            numbers = np.memmap(path, kind, "r", tensor.start, math.prod(tensor.shape))
            for at in range(0, len(numbers), PIECE):
                if ((numbers[at : at + PIECE] & exponent) == exponent).any():
                    raise ValueError(f"model {directory}: tensor {tensor.name!r} holds numbers that are not finite")


def side_files(directory: Path) -> dict[str, bytes]:
    """The files beside the weights that make the directory loadable: configuration, tokenizer, chat template."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in _SUFFIXES and not path.name.endswith(".safetensors.index.json")
    }
