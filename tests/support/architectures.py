"""A tiny random model of each architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from functions.models.pretrained import save_model

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    small = dict(SMALL)
    match kind:
        case "gemma3_text":
            small |= {
                "final_logit_softcapping": 5.0,
                "sliding_window": 40,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        case "mistral":
            small |= {"sliding_window": None}
        case "granite":
            small |= {"logits_scaling": 3.0}
        case "qwen3_moe":
            small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        case "gpt2":
            small = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                     "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **small | changes)


def tiny_model(kind: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model with weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    save_model(model, directory)
    return directory
