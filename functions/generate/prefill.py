"""Prompts through the model, many at once: their keys and values, and the logits that follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.generate.llama import Llama


def prefill(
    model: Llama, rotations: Mapping[str, Tensor], prompts: Sequence[npt.NDArray[np.int32]], max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, 2, P, kv heads, T, D] and the logits after each prompt [P, V].

    Keys beyond a prompt's end are finite and mean nothing.
    Runs batches of at most `max_tokens` tokens, padding included (one prompt where it alone is longer), of prompts
    sorted by length. A batch of one depends on nothing but its prompt.
    """
    longest = max(len(p) for p in prompts)
    shape = (len(model.layers), 2, len(prompts), model.kv_heads, longest, model.head_dim)
    cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
    logits: list[Tensor] = [torch.empty(0)] * len(prompts)
    batch: list[int] = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for place, number in enumerate(order):
        batch.append(number)
        following = order[place + 1] if place + 1 < len(order) else None
        if following is None or (len(batch) + 1) * len(prompts[following]) > max_tokens:
            own, last = _batch(model, rotations, [prompts[i] for i in batch])
            cache[:, :, batch, :, : own.shape[4]] = own
            for i, row in zip(batch, last, strict=True):
                logits[i] = row
            batch = []
    return cache, torch.stack(logits)


def _batch(
    model: Llama, rotations: Mapping[str, Tensor], prompts: Sequence[npt.NDArray[np.int32]]
) -> tuple[Tensor, Tensor]:
    """Prompts are padded on the right, where causal attention does not look."""
    rows, longest = len(prompts), max(len(p) for p in prompts)
    tokens = np.zeros((rows, longest), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = torch.tensor([len(p) for p in prompts], device=model.device)
    shape = (len(model.layers), 2, rows, model.kv_heads, longest, model.head_dim)
    cache = torch.empty(shape, dtype=model.dtype, device=model.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(rows, longest, -1, model.head_dim).transpose(1, 2) for t in (q, k, v))
        cache[layer, 0] = k
        cache[layer, 1] = v
        window = model.layers[layer].window
        mask = None
        if window is not None and window < longest:
            at = torch.arange(longest, device=q.device)
            mask = (at <= at[:, None]) & (at[:, None] - at < window)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=1.0, enable_gqa=True)
        return out.transpose(1, 2).reshape(rows * longest, -1)

    rotation = {name: table[:longest].repeat(rows, 1, 1) for name, table in rotations.items()}
    hidden = model.hidden(torch.from_numpy(tokens).to(model.device).view(-1), rotation, attend)
    last = hidden.view(rows, longest, -1)[torch.arange(rows, device=model.device), lengths - 1]
    return cache, model.logits(last)
