"""Keys and values into and out of transformers' DynamicCache: [rows, kv heads, tokens, head dim] for each layer, the
rows of a batch padded on the left."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from functions.generate.engine.keys_values import KeysValues, Layout


@torch.inference_mode()
def layout_of(model: Any, device: torch.device) -> Layout | str:
    """What a model's cache looks like, by a look at that of two tokens; or why it does not move."""
    cache = getattr(
        model(torch.zeros((1, 2), dtype=torch.long, device=device), use_cache=True), "past_key_values", None
    )
    if not isinstance(cache, DynamicCache):
        return f"{type(model).__name__} keeps no DynamicCache but a {type(cache).__name__}"
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            return f"{type(model).__name__}: layer {number} keeps a {type(layer).__name__}, not all keys and values"
    pairs = _pairs(cache)
    shapes = {tuple(tensor.shape) for pair in pairs for tensor in pair}
    if len(shapes) != 1:
        return f"{type(model).__name__}: its layers' keys and values differ in shape ({sorted(shapes)})"
    _, heads, _, width = pairs[0][0].shape
    return Layout(heads, len(pairs), width, pairs[0][0].dtype)


def _pairs(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer."""
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def filled(caches: Sequence[KeysValues], device: torch.device) -> DynamicCache:
    """A batch's cache, from its rows'."""
    heads, layers, _, _, width = caches[0].tensor.shape
    longest = max(cache.tokens for cache in caches)
    shape = (layers, 2, len(caches), heads, longest, width)
    whole = torch.zeros(shape, dtype=caches[0].tensor.dtype, device=device)
    for row, cache in enumerate(caches):
        whole[:, :, row, :, longest - cache.tokens :] = cache.tensor.permute(1, 2, 0, 3, 4)
    return DynamicCache([(layer[0], layer[1]) for layer in whole])


def taken(cache: DynamicCache, row: int, tokens: int) -> KeysValues:
    """A copy of the last `tokens` of a row."""
    pairs = [(keys[row], values[row]) for keys, values in _pairs(cache)]
    heads, length, width = pairs[0][0].shape
    whole = pairs[0][0].new_empty(heads, len(pairs), 2, tokens, width)
    for number, pair in enumerate(pairs):
        for which, tensor in enumerate(pair):
            whole[:, number, which] = tensor[:, length - tokens :]
    return KeysValues(whole)
