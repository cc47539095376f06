"""Prompts through the model, many at once: their keys and values, and the logits that follow them.

A head that all prompts begin with (a system prompt) goes through the model once; the rest of each attends to it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.generate.torch.llama import Llama

WORTH_SHARING = 16
"""Tokens of a common head from which on it is computed apart."""


def common_head(prompts: Sequence[npt.NDArray[np.int32]]) -> int:
    """Tokens that all prompts begin with, at least one of each left out; 0 for fewer than WORTH_SHARING."""
    longest = min(len(p) for p in prompts) - 1
    same = np.logical_and.reduce([p[:longest] == prompts[0][:longest] for p in prompts])
    head = longest if same.all() else int(same.argmin())
    return head if head >= WORTH_SHARING and len(prompts) > 1 else 0


def prefill(
    model: Llama, rotations: Mapping[str, Tensor], prompts: Sequence[npt.NDArray[np.int32]], max_tokens: int,
    head: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values [layers, 2, P, kv heads, T, D] and the logits after each prompt [P, V].

    Keys beyond a prompt's end are finite and mean nothing. `head` [layers, 2, kv heads, H, D]: those of the H tokens
    that all prompts begin with; each is longer.
    Runs batches of at most `max_tokens` tokens, padding included (one prompt where it alone is longer), of prompts
    sorted by length. A batch of one without a head depends on nothing but its prompt.
    """
    longest = max(len(p) for p in prompts)
    begin = 0 if head is None else head.shape[3]
    shape = (len(model.layers), 2, len(prompts), model.kv_heads, longest, model.head_dim)
    cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
    if head is not None:
        cache[:, :, :, :, :begin] = head[:, :, None]
    logits: list[Tensor] = [torch.empty(0)] * len(prompts)
    batch: list[int] = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for place, number in enumerate(order):
        batch.append(number)
        following = order[place + 1] if place + 1 < len(order) else None
        if following is None or (len(batch) + 1) * (len(prompts[following]) - begin) > max_tokens:
            own, last = _batch(model, rotations, [prompts[i][begin:] for i in batch], head)
            cache[:, :, batch, :, begin : begin + own.shape[4]] = own
            for i, row in zip(batch, last, strict=True):
                logits[i] = row
            batch = []
    return cache, torch.stack(logits)


def _batch(
    model: Llama, rotations: Mapping[str, Tensor], prompts: Sequence[npt.NDArray[np.int32]], head: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Prompts (what follows the head) are padded on the right, where causal attention does not look."""
    rows, longest = len(prompts), max(len(p) for p in prompts)
    begin = 0 if head is None else head.shape[3]
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
        if head is not None:
            k, v = (torch.cat((head[layer, i].expand(rows, -1, -1, -1), x), dim=2) for i, x in enumerate((k, v)))
        window = model.layers[layer].window
        mask = None
        if begin or (window is not None and window < longest):
            at = torch.arange(begin + longest, device=q.device)
            asks = at[begin:, None]
            mask = at <= asks if window is None else (at <= asks) & (asks - at < window)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=1.0, enable_gqa=True)
        return out.transpose(1, 2).reshape(rows * longest, -1)

    rotation = {name: table[begin : begin + longest].repeat(rows, 1, 1) for name, table in rotations.items()}
    hidden = model.hidden(torch.from_numpy(tokens).to(model.device).view(-1), rotation, attend)
    last = hidden.view(rows, longest, -1)[torch.arange(rows, device=model.device), lengths - 1]
    return cache, model.logits(last)
