"""The shape of a model from its Hugging Face directory: what the roofline needs of it. No weights are read."""

import json
import math
from pathlib import Path
from typing import Any

from functions.weights.files import decode_header, weight_files
from orchestrator.planner.devices import ModelShape


def text_config(directory: Path) -> dict[str, Any]:
    """What config.json says of the language model, where that is a part of the model."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    return config.get("text_config", config)  # type: ignore[no-any-return]


def read_shape(directory: Path, *, bytes_per_value: int = 2) -> ModelShape:
    """Parameters are those of the safetensors headers. Raises ValueError, in one line, for a directory without them."""
    files = weight_files(directory)
    config = text_config(directory)
    missing = [k for k in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not _count(config.get(k))]
    if missing:
        raise ValueError(f"{directory / 'config.json'}: lacks {', '.join(missing)}: no roofline can be made of it")
    heads = config["num_attention_heads"]
    return ModelShape(
        name=directory.name,
        parameters=float(sum(math.prod(t.shape) for file in files for t in decode_header(file))),
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        bytes_per_value=bytes_per_value,
    )


def _count(value: object) -> bool:
    return isinstance(value, int) and value > 0
