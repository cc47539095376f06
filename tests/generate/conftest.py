"""Tiny random models of each architecture as Hugging Face directories, and requests for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from functions.generate.engine.base import Request

VOCABULARY, CONTEXT, EOS = 97, 128, 2

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama-tied-rope3": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True, rope_parameters=_LLAMA3),
    "llama-linear-rope": lambda: LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-window": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3-sliding": lambda: Gemma3TextConfig(
        **_SHAPE, head_dim=16, sliding_window=8, layer_types=["sliding_attention"] * _SHAPE["num_hidden_layers"]
    ),
    "gemma3-full": lambda: Gemma3TextConfig(
        **_SHAPE, head_dim=16, layer_types=["full_attention"] * _SHAPE["num_hidden_layers"]
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=CONTEXT, bos_token_id=1, eos_token_id=EOS
    ),
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a random model, by name; made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            config = CONFIGS[name]()
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # norms and biases are not all 1 and 0
                        parameter.add_(0.1 * torch.randn_like(parameter))
            made[name] = tmp_path_factory.mktemp(name)
            transformers.utils.logging.disable_progress_bar()
            model.save_pretrained(made[name])
        return made[name]

    return make


def requests_for(groups: int, samples: int, *, seed: int = 0, longest: int = 30) -> list[Request]:
    """`groups` random prompts of 2..longest tokens, `samples` of each; numbers count up."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCABULARY, rng.integers(2, longest + 1)).astype(np.int32) for _ in range(groups)]
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return [
        Request(g * samples + i, g, i, prompt, *nothing) for g, prompt in enumerate(prompts) for i in range(samples)
    ]


@pytest.fixture(scope="session", name="requests_for")
def requests_for_() -> Callable[..., list[Request]]:
    return requests_for
