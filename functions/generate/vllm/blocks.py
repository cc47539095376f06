"""Keys and values in and out of the blocks of vLLM's paged cache, in its worker.

    [kv heads, layers, 2, tokens, head dim]  <- this rank's heads ->  cache of each layer [blocks, heads, N, C]

Where vLLM has several workers, all of them map the memory on the left (cache.py). Blocks are written by the
attention backend's own `do_kv_cache_update`, the function by which a forward pass writes them. It is also asked where
in a block it puts what (`order`), for that is its affair: a CPU's kernels pack keys for their vector units, a GPU's
hold keys and values side by side. So nothing here knows a layout, and one in which this cannot work is noticed before
anything moves.

Read against vLLM 0.32 (v1/kv_cache_interface.py: every layer's cache is a view [blocks, heads, N, C] whatever lies
behind it; v1/attention/backends/*.py: do_kv_cache_update).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 2048
"""Tokens of a layer that are copied at a time: a GPU has little memory besides its weights and blocks."""
_DIGIT = 128
"""Whole numbers below this are exact in every dtype of a cache."""


def heads_of_rank(heads: int, ranks: int, rank: int) -> slice:
    """The model's kv heads that a tensor-parallel rank holds: its share, or one that several hold where there are more
    ranks than heads (vllm/model_executor/layers/linear.py, QKVParallelLinear)."""
    if ranks >= heads:
        first = rank // (ranks // heads)
        return slice(first, first + 1)
    share = heads // ranks
    return slice(rank * share, (rank + 1) * share)


def writes(heads: int, ranks: int, rank: int) -> bool:
    """Whether the rank is the first of those that hold its heads."""
    return ranks <= heads or rank % (ranks // heads) == 0


@dataclass(frozen=True)
class Shared:
    """Memory that processes share: a tensor for each that maps the file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        size = torch.Size(self.shape)
        return torch.from_file(self.file, shared=True, size=size.numel(), dtype=self.dtype).view(size)


def order(layer: Any) -> Tensor:
    """[heads, 2, N, head dim]: where in a block, flattened, each element of N tokens' keys and values lies.

    Writes each element's number there, digit by digit, into block 0: vLLM's null block, which nobody reads; what it
    held is put back. Raises ValueError where keys and values are not kept as they come (quantized, say)."""
    cache = layer.kv_cache
    (_, heads, length, content), held = cache.shape, cache[0].clone()
    numbers = torch.arange(heads * length * content, device=cache.device)
    if layer.head_size * 2 != content:
        raise ValueError(
            f"a token has {content} values a head in its cache, twice {layer.head_size} are keys and values"
        )
    slots, found = torch.arange(length, device=cache.device), torch.zeros_like(numbers)
    for weight in (1, _DIGIT, _DIGIT**2, _DIGIT**3):
        digits = (numbers // weight % _DIGIT).to(cache.dtype).view(heads, 2, length, -1)
        keys, values = (digits[:, part].transpose(0, 1).contiguous() for part in (0, 1))
        layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
        found += cache[0].reshape(-1).long() * weight
    cache[0].copy_(held)
    where = found.argsort()
    if not torch.equal(found[where], numbers):
        raise ValueError("its attention backend keeps keys and values in another form than they come")
    return where.view(heads, 2, length, layer.head_size)


def orders(layers: Sequence[Any]) -> list[Tensor]:
    """`order` of every layer, looked at once for those of one kind. Raises ValueError, as `order` does."""
    found: dict[tuple[object, ...], Tensor] = {}
    kinds = [(type(layer.impl), layer.kv_cache.shape, layer.kv_cache.stride()) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        if layer.attn_backend.forward_includes_kv_cache_update:
            raise ValueError(f"its attention backend {layer.attn_backend.get_name()} has no function for them")
        if kind not in found:
            found[kind] = order(layer)
    return [found[kind] for kind in kinds]


def read(
    layers: Sequence[Any], orders: Sequence[Tensor], blocks: Sequence[int], block_size: int, into: Tensor,
    *, chunk: int = CHUNK,
) -> None:  # fmt: skip
    """Copies the first tokens of `blocks` into `into` [heads, layers, 2, tokens, head dim], `chunk` tokens a time."""
    for number, (layer, where) in enumerate(zip(layers, orders, strict=True)):
        cache, length = layer.kv_cache, layer.kv_cache.shape[2]
        pages = _parts(blocks, block_size // length).to(cache.device)
        step = max(1, chunk // length)
        for turn, some in enumerate(torch.split(pages, step)):
            held = cache[some].reshape(len(some), -1).index_select(1, where.flatten()).view(len(some), *where.shape)
            target = into[:, number, :, turn * step * length :][:, :, : len(some) * length]
            for head, both in enumerate(held.permute(1, 2, 0, 3, 4).flatten(2, 3)):
                for part in (0, 1):
                    target[head, part].copy_(both[part, : target.shape[2]])


def write(layers: Sequence[Any], blocks: Sequence[int], block_size: int, source: Tensor, *, chunk: int = CHUNK) -> None:
    """Copies `source` [heads, layers, 2, tokens, head dim] into `blocks`, from the first one's first token on."""
    device = layers[0].kv_cache.device
    slots = _parts(blocks, block_size)[: source.shape[3]].to(device)
    for number, layer in enumerate(layers):
        for given, where in zip(torch.split(source[:, number], chunk, 2), torch.split(slots, chunk), strict=True):
            keys, values = (given[:, part].to(device).transpose(0, 1).contiguous() for part in (0, 1))
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, where)


def _parts(blocks: Sequence[int], each: int) -> Tensor:
    """The numbers of the `each` equal parts of every block (tokens, or what a kernel calls a block)."""
    return (torch.tensor(blocks)[:, None] * each + torch.arange(each)).flatten()


class CacheMethods:
    """Methods added to vLLM's worker (worker.py)."""

    vllm_config: Any
    _rlhf_layers: list[Any]
    _rlhf_orders: list[Tensor]

    @torch.inference_mode()
    def rlhf_open(self, heads: int, names: Sequence[str]) -> str | None:
        """Once, before the others. `names` are the model's attention layers in order. Why keys and values cannot go in
        and out; None where they can."""
        context, held = self.vllm_config.compilation_config.static_forward_context, heads_of_rank(heads, *_place())
        self._rlhf_layers = [context[name] for name in names]
        found = {layer.kv_cache.shape[1] for layer in self._rlhf_layers}
        if found != {held.stop - held.start}:
            return f"its cache has {found} heads on a rank, wants {held.stop - held.start} of {heads}"
        settle()
        try:
            self._rlhf_orders = orders(self._rlhf_layers)
        except Exception as error:  # whatever a backend has against being called so: samples are computed again then
            return " ".join(str(error).split()) or type(error).__name__
        return None

    @torch.inference_mode()
    def rlhf_read(self, into: Tensor | Shared, blocks: Sequence[int], block_size: int) -> None:
        """This rank's part of a sample's keys and values, out of the blocks."""
        whole = into.tensor() if isinstance(into, Shared) else into
        heads, place = len(whole), _place()
        if writes(heads, *place):
            settle()
            read(self._rlhf_layers, self._rlhf_orders, blocks, block_size, whole[heads_of_rank(heads, *place)])

    @torch.inference_mode()
    def rlhf_write(self, source: Tensor | Shared, blocks: Sequence[int], block_size: int) -> None:
        """The other way round."""
        whole = source.tensor() if isinstance(source, Shared) else source
        settle()
        write(self._rlhf_layers, blocks, block_size, whole[heads_of_rank(len(whole), *_place())])
        settle()


def settle() -> None:
    """Waits for what a GPU was told: a step that is under way may still write to blocks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _place() -> tuple[int, int]:
    """Ranks, and this one."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
