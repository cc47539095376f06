"""Models that contradict themselves are refused before they cost anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from functions.weights.files import check_finite, check_vocabulary, weight_files


def model(directory: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("config", "generation", "line"),
    [
        ({"vocab_size": 12}, {}, r"config.json says vocab_size 12, the weights have 8 embeddings"),
        ({"vocab_size": 8, "eos_token_id": 8}, {}, r"config.json: eos_token_id 8 lies outside of 8 tokens"),
        ({"vocab_size": 8, "eos_token_id": [0, -1]}, {}, r"eos_token_id -1 lies outside"),
        ({"vocab_size": 8}, {"eos_token_id": 99}, r"generation_config.json: eos_token_id 99 lies outside"),
        ({"text_config": {"vocab_size": 7}}, {}, r"vocab_size 7, the weights have 8"),
        ({"vocab_size": 8, "eos_token_id": [0, 7]}, {"eos_token_id": 7}, None),
        ({"vocab_size": 8, "eos_token_id": None}, {}, None),
    ],
)
def test_vocabulary(config: dict[str, object], generation: dict[str, int], line: str | None, tmp_path: Path) -> None:
    directory = model(tmp_path / "m", config, {"model.embed_tokens.weight": torch.zeros(8, 2)})
    (directory / "generation_config.json").write_text(json.dumps(generation))
    if line is None:
        check_vocabulary(directory, weight_files(directory))
    else:
        with pytest.raises(ValueError, match=line):
            check_vocabulary(directory, weight_files(directory))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    """The last of five million, so that it lies in a further piece; the largest finite numbers are fine."""
    largest = torch.finfo(dtype).max
    weights = torch.full((5_000_000,), largest, dtype=dtype)
    weights[::2] = -largest
    good = model(tmp_path / "good", {"vocab_size": 8}, {"w": weights, "n": torch.tensor(np.array([1, 2]))})
    check_finite(good, weight_files(good))
    weights[-1] = value
    bad = model(tmp_path / "bad", {"vocab_size": 8}, {"w": weights})
    with pytest.raises(ValueError, match="tensor 'w' holds numbers that are not finite"):
        check_finite(bad, weight_files(bad))
