"""The mathematics of Llama-shaped decoders on rows of tokens: Llama, Mistral, Qwen2, Qwen3, Gemma 3 (text).

    x = embed(token)                                            [M, hidden]
    layer:  x += o(attend(rope(norm(qkv(norm(x))))))            attention itself is the caller's (`Attend`)
            x += down(act(gate(norm(x))) * up(norm(x)))
    logits = norm(x) head^T                                     [M, vocab]

What is fused when weights are loaded: q, k and v into one projection, gate and up into another. The rotation works on
pairs (i, i + D/2) of a head; rows of q and k are reordered so that a pair is adjacent and the rotation is one complex
product (dot products of q and k do not see the order). The table that rotates both carries the square root of the
attention scale, so scores need no scaling.

Left out: attention and logit soft-capping, partial rotary, mixtures of experts, rope whose table depends on the
sequence's length (dynamic, longrope): `unsupported` names them, and transformers' `generate` does those models.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from functions.generate.torch.linear import Linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [M, heads, D], k [M, kv heads, D], v [M, kv heads, D]) -> [M, heads * D]."""

ROTARY: Mapping[str, str] = {
    "LlamaForCausalLM": "llama.modeling_llama.LlamaRotaryEmbedding",
    "MistralForCausalLM": "mistral.modeling_mistral.MistralRotaryEmbedding",
    "Qwen2ForCausalLM": "qwen2.modeling_qwen2.Qwen2RotaryEmbedding",
    "Qwen3ForCausalLM": "qwen3.modeling_qwen3.Qwen3RotaryEmbedding",
    "Gemma3ForCausalLM": "gemma3.modeling_gemma3.Gemma3RotaryEmbedding",
}
"""Architectures whose layer is the one above, and the class in transformers.models that knows their frequencies."""

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def unsupported(config: Any) -> str | None:
    """Why this module cannot compute the model of `config` (transformers' object), or None when it can."""
    architecture = (config.architectures or [type(config).__name__])[0]
    if architecture not in ROTARY:
        return f"{architecture} is not Llama-shaped"
    for rope in _ropes(config).values():
        if rope.get("rope_type", "default") in ("dynamic", "longrope"):
            return f"rope type {rope['rope_type']} depends on the length"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "partial rotary embedding"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            return f"{name} is set"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention"
    if _activation(config) not in _ACTIVATIONS:
        return f"activation {_activation(config)!r}"
    if getattr(config, "quantization_config", None):
        return "quantized weights"
    return None


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """Rope parameters by layer type, of the types that there are; one entry named "" where all layers share them."""
    parameters = config.rope_parameters
    if not all(isinstance(value, dict) for value in parameters.values()):
        return {"": parameters}
    return {kind: parameters[kind] for kind in sorted(set(config.layer_types)) if parameters.get(kind)}


@dataclass(frozen=True)
class Layer:
    norm_attention: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    norm_attention_out: Tensor | None
    norm_mlp: Tensor
    gate_up: Linear
    down: Linear
    norm_mlp_out: Tensor | None
    rope: str
    window: int | None
    """Keys at distance >= window are not seen (sliding attention); None: all are."""


@dataclass(frozen=True)
class Llama:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    context: int
    """Positions that the model was made for (`max_position_embeddings`)."""
    embed_scale: float | None
    activation: Callable[[Tensor], Tensor]
    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    frequencies: Mapping[str, tuple[Tensor, float]]
    """By rope name: angular frequency of each pair [D/2], and the factor on the rotation."""
    scale: float
    """Of attention scores."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def linears(self) -> list[Linear]:
        return [self.head, *(one for layer in self.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down))]

    def rotations(self, positions: int) -> dict[str, Tensor]:
        """By rope name: exp(i * angle) * sqrt(attention scale) for positions 0.., complex64 [positions, 1, D/2]."""
        at = torch.arange(positions, device=self.device, dtype=torch.float32)
        return {
            name: torch.polar(torch.full_like(angles, factor * self.scale**0.5), angles)[:, None]
            for name, (frequency, factor) in self.frequencies.items()
            for angles in [at[:, None] * frequency]
        }

    def hidden(self, tokens: Tensor, rotation: Mapping[str, Tensor], attend: Attend) -> Tensor:
        """tokens [M], rotation of each row's position by rope name [M, 1, D/2] -> last layer's output [M, hidden]."""
        x = F.embedding(tokens, self.embed)
        if self.embed_scale is not None:
            x = x * torch.tensor(self.embed_scale, dtype=x.dtype)
        for number, layer in enumerate(self.layers):
            y = self._attention(number, layer, self._norm(x, layer.norm_attention), rotation[layer.rope], attend)
            x = x + (y if layer.norm_attention_out is None else self._norm(y, layer.norm_attention_out))
            y = self._mlp(layer, self._norm(x, layer.norm_mlp))
            x = x + (y if layer.norm_mlp_out is None else self._norm(y, layer.norm_mlp_out))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> [M, vocab]."""
        return self.head(self._norm(hidden, self.norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _attention(self, number: int, layer: Layer, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((self._norm(qk[:, :heads], layer.q_norm), self._norm(qk[:, heads:], layer.k_norm)), 1)
        pairs = torch.view_as_complex(qk.float().view(*qk.shape[:2], -1, 2))
        qk = torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
        return layer.out(attend(number, qk[:, :heads], qk[:, heads:], v))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, -1)
        return layer.down(self.activation(gate) * up)


def load(directory: Path, config: Any, *, dtype: torch.dtype, device: torch.device) -> Llama:
    """The model in a Hugging Face directory (safetensors). Raises ValueError naming a tensor that is missing or that
    this module would not use."""
    tensors = _Tensors(directory, dtype, device)
    gemma = config.architectures[0].startswith("Gemma")
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    pairs = torch.arange(head_dim).view(2, -1).t().reshape(-1)  # 0, D/2, 1, D/2 + 1, ...

    def norm(name: str) -> Tensor | None:
        weight = tensors.take(name)
        # Gemma multiplies by 1 + weight.
        return None if weight is None else (weight.float() + 1).to(dtype) if gemma else weight

    def need(name: str) -> Tensor:
        weight = norm(name)
        if weight is None:
            raise ValueError(f"{directory}: tensor {name!r} is missing")
        return weight

    def paired(tensor: Tensor) -> Tensor:
        return tensor.view(-1, head_dim, *tensor.shape[1:])[:, pairs].reshape(tensor.shape)

    def join(prefix: str, names: tuple[str, ...], reorder: tuple[str, ...] = ()) -> Linear:
        weights, biases = [], []
        for name in names:
            weight, bias = tensors.need(f"{prefix}.{name}.weight"), tensors.take(f"{prefix}.{name}.bias")
            if bias is None:
                bias = torch.zeros(0)
            weights.append(paired(weight) if name in reorder else weight)
            biases.append(paired(bias) if name in reorder and len(bias) else bias)
        return Linear(torch.cat(weights), torch.cat(biases) if all(len(b) for b in biases) else None)

    layers = []
    for number in range(config.num_hidden_layers):
        at = f"model.layers.{number}"
        q_norm, k_norm = norm(f"{at}.self_attn.q_norm.weight"), norm(f"{at}.self_attn.k_norm.weight")
        kind = (getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)[number]
        # Mistral has no layer types: a window counts for every layer.
        everywhere = getattr(config, "layer_types", None) is None
        windowed = kind == "sliding_attention" or everywhere
        layers.append(
            Layer(
                norm_attention=need(f"{at}.input_layernorm.weight"),
                qkv=join(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj")),
                q_norm=None if q_norm is None else q_norm[pairs],
                k_norm=None if k_norm is None else k_norm[pairs],
                out=join(f"{at}.self_attn", ("o_proj",)),
                norm_attention_out=need(f"{at}.post_attention_layernorm.weight") if gemma else None,
                norm_mlp=need(f"{at}.{'pre_feedforward' if gemma else 'post_attention'}_layernorm.weight"),
                gate_up=join(f"{at}.mlp", ("gate_proj", "up_proj")),
                down=join(f"{at}.mlp", ("down_proj",)),
                norm_mlp_out=need(f"{at}.post_feedforward_layernorm.weight") if gemma else None,
                rope=kind if kind in _ropes(config) else "",
                window=getattr(config, "sliding_window", None) if windowed else None,
            )
        )
    embed = tensors.need("model.embed_tokens.weight")
    head = tensors.take("lm_head.weight")
    model = Llama(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        context=config.max_position_embeddings,
        embed_scale=config.hidden_size**0.5 if gemma else None,
        activation=_ACTIVATIONS[_activation(config)],
        embed=embed,
        layers=tuple(layers),
        norm=need("model.norm.weight"),
        head=Linear(embed if config.tie_word_embeddings or head is None else head, None),
        frequencies=_frequencies(config, device),
        scale=getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5,
    )
    tensors.check_all_taken()
    return model


def _frequencies(config: Any, device: torch.device) -> dict[str, tuple[Tensor, float]]:
    """As transformers' own rotary module computes them (linear, llama3 and yarn scaling included)."""
    module, name = ROTARY[config.architectures[0]].rsplit(".", 1)
    rotary = getattr(importlib.import_module(f"transformers.models.{module}"), name)(config)
    found = {}
    for kind in _ropes(config):
        prefix = f"{kind}_" if kind else ""
        frequency = getattr(rotary, f"{prefix}inv_freq").to(device, torch.float32)
        found[kind] = (frequency, float(getattr(rotary, f"{prefix}attention_scaling")))
    return found


class _Tensors:
    """The tensors of a directory by name, each to be taken once."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        index = directory / "model.safetensors.index.json"
        files = ["model.safetensors"]
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        self._directory = directory
        self._left: dict[str, Tensor] = {}
        for file in files:
            if not (directory / file).exists():
                raise ValueError(f"{directory}: {file} is missing")
            self._left |= {k: v.to(dtype) for k, v in load_file(directory / file, device=str(device)).items()}

    def take(self, name: str) -> Tensor | None:
        return self._left.pop(name, None)

    def need(self, name: str) -> Tensor:
        if name not in self._left:
            raise ValueError(f"{self._directory}: tensor {name!r} is missing")
        return self._left.pop(name)

    def check_all_taken(self) -> None:
        left = [name for name in self._left if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ValueError(f"{self._directory}: tensor {left[0]!r} and {len(left) - 1} others have no place here")
