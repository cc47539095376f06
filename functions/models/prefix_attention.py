"""Attention over a shared pack: a response attends to its prompt's one copy and to itself, to nothing else.

Registered with transformers as the attention implementation `prefix_shared`; the pack's `prefixes` reach it as a
keyword argument of the model's forward. Exactly the needed scores are computed: [P, P] per prompt and
[count, width, P + width] per bucket of responses, where one block mask over a pack of T tokens would compute [T, T].
Grouped key heads are not repeated: the queries that share a key head are folded into its rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from functions.models.context_parallel import Tokens
from functions.models.packing import Bucket, Prefix

NAME = "prefix_shared"


def prefix_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefixes: tuple[Prefix, ...],
    scaling: float | None = None,
    tokens: Tokens | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D]; key and value [1, K, T, D], K key heads; returns ([1, T, H, D], None). T with
    `tokens`: this rank's of all.

    Valid where every token may see all before it: no sliding window shorter than the longest sequence, no bias by
    distance, no soft-capped scores, no sinks (forward.py chooses by architecture). Dropout is not applied.
    """
    if tokens is not None:
        query, key, value = (tokens.to_heads(states) for states in (query, key, value))
    q, k, v = query[0], key[0], value[0]
    parts: list[Tensor] = []
    for prefix in prefixes:
        own = slice(prefix.start, prefix.start + prefix.length)
        parts.append(_causal(q[:, own], k[:, own], v[:, own], scaling))
        for bucket in prefix.buckets:
            parts.append(_responses(q, k, v, own, bucket, scaling))
    out = torch.cat(parts)[None]
    return out if tokens is None else tokens.from_heads(out), None


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """[P, H, D] of one prompt, q [H, P, D]."""
    repeat = q.shape[0] // k.shape[0]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    out = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scaling)
    return out[0].transpose(0, 1)


def _responses(q: Tensor, k: Tensor, v: Tensor, prompt: slice, bucket: Bucket, scaling: float | None) -> Tensor:
    """[tokens, H, D] of a bucket: its rows against prompt and themselves. Padding lies to the right, so that the
    causal mask alone keeps it out of every real token; what padded queries give is dropped."""
    heads, keys, count, width = q.shape[0], k.shape[0], bucket.count, bucket.width
    repeat, head_dim = heads // keys, q.shape[-1]
    folded = _rows(q, bucket).view(keys, repeat, count, width, -1).permute(2, 0, 1, 3, 4)
    folded = folded.reshape(count, keys, repeat * width, head_dim)
    both = []
    for states in (k, v):
        shared = states[:, prompt].expand(count, -1, -1, -1)
        own = _rows(states, bucket).view(keys, count, width, -1).transpose(0, 1)
        both.append(torch.cat((shared, own), 2))
    mask = _mask(prompt.stop - prompt.start, width, repeat, q.device)
    out = scaled_dot_product_attention(folded, both[0], both[1], attn_mask=mask, scale=scaling)
    out = out.view(count, heads, width, head_dim).transpose(1, 2).reshape(count * width, heads, head_dim)
    return out if bucket.real is None else out.index_select(0, bucket.real)


def _rows(states: Tensor, bucket: Bucket) -> Tensor:
    """[heads, count * width, D] of states [heads, T, D]."""
    if bucket.gather is None:
        return states[:, bucket.start : bucket.start + bucket.tokens].contiguous()
    return states.index_select(1, bucket.gather)


def _mask(prompt: int, width: int, repeat: int, device: torch.device) -> Tensor:
    """bool [repeat * width, prompt + width]: row i of each head sees the prompt and places 0..i."""
    mask = torch.ones(width, prompt + width, dtype=torch.bool, device=device).tril(prompt)
    return mask.repeat(repeat, 1)


AttentionInterface.register(NAME, prefix_attention)
