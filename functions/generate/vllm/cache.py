"""Keys and values of samples that move, on the scheduler's side of vLLM: which blocks hold them, and which will.

    out   a sample's blocks --rlhf_read, every rank its heads--> KeysValues
    in    KeysValues --rlhf_write--> free blocks, entered in vLLM's prefix cache under the hashes that vLLM computed for
          the request: when it is scheduled, it finds them as it finds another sample's prompt

What goes in are whole blocks: the tokens after the last one (fewer than 16 on a GPU, 32 on a CPU) are computed with
the next. Nothing is configured in vLLM for this, so a rollout in which nothing moves is the same rollout. (A KV
connector, vLLM's interface for such things, would bring the part of a block as well, and change every rollout:
docs/vllm.md.)

Worker processes (one for each GPU, where there are several) are reached through memory without a name (memfd_create),
which they open through /proc, as processes of one user may: nothing is left behind however a process ends, and the size
of a container's /dev/shm does not matter.

Read against vLLM 0.32: v1/core/{block_pool,kv_cache_manager}.py, v1/core/sched/scheduler.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functions.generate.engine.keys_values import KeysValues, Layout
from functions.generate.vllm.blocks import Shared

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class BlockCache:
    """The blocks of one engine, whose scheduler is in this process (vllm_start.environment)."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        core: Any = engine.engine_core
        self._scheduler = core.engine_core.scheduler
        self._manager = self._scheduler.kv_cache_manager
        self._block_size: int = self._scheduler.block_size

    @cached_property
    def layout(self) -> Layout | str:
        """Of the keys and values that go in and out; or why none can."""
        model = self._engine.vllm_config.model_config
        if len(self._groups) != 1:
            return f"{len(self._groups)} kinds of layers, each with a cache of its own"
        spec = self._groups[0].kv_cache_spec
        reason = _another_attention(spec)
        if reason is None and spec.dtype != model.dtype:
            reason = f"its cache is in {spec.dtype}, the model in {model.dtype}"
        if reason is not None:
            return reason
        from vllm.model_executor.models.utils import extract_layer_index

        layers, heads = sorted(self._groups[0].layer_names, key=extract_layer_index), model.get_total_num_kv_heads()
        for reason in self._engine.collective_rpc("rlhf_open", args=(heads, layers)):
            if reason is not None:
                return str(reason)
        return Layout(heads, len(layers), spec.head_size, spec.dtype)

    @property
    def _groups(self) -> Sequence[Any]:
        groups: Sequence[Any] = self._manager.kv_cache_config.kv_cache_groups
        return groups

    # --- out -------------------------------------------------------------------------------------------------------

    def take(self, name: str, tokens: int) -> KeysValues | None:
        """Of the request's first `tokens`, all of which steps that are over have computed. None where vLLM has not (or
        no longer: it was preempted) all of them."""
        request, layout = self._scheduler.requests.get(name), self.layout
        if request is None or isinstance(layout, str):
            return None
        (blocks,) = self._manager.get_block_ids(name)
        needed = -(-tokens // self._block_size)
        if request.num_computed_tokens < tokens or len(blocks) < needed:
            return None
        with self._reached(torch.Size((layout.heads, layout.layers, 2, tokens, layout.width)), layout.dtype) as (
            into,
            at,
        ):
            self._engine.collective_rpc("rlhf_read", args=(at, blocks[:needed], self._block_size))
        return KeysValues(into)

    # --- in --------------------------------------------------------------------------------------------------------

    def give(self, name: str, cache: KeysValues) -> int:
        """Puts the cache of a request that waits into blocks that it will find when it is scheduled, as far as it finds
        none there already and blocks are free. How many tokens that were."""
        request, pool, size = self._scheduler.requests[name], self._manager.block_pool, self._block_size
        found, shared, _ = self._manager.get_computed_blocks(request)
        (held,) = found.blocks
        pool.touch(held)  # lest they be taken for what comes after them
        fresh = pool.get_new_blocks(min(cache.tokens // size - len(held), pool.get_num_free_blocks()))
        blocks, tokens = [*held, *fresh], len(fresh) * size
        try:
            if fresh:
                source = cache.tensor[:, :, :, shared : shared + tokens]
                numbers = [block.block_id for block in fresh]
                with self._reached(source.shape, source.dtype, source) as (_, at):
                    self._engine.collective_rpc("rlhf_write", args=(at, numbers, self._block_size))
                pool.cache_full_blocks(request, blocks, len(held), len(blocks), size, 0)
        finally:
            pool.free_blocks(reversed(blocks))  # the last in the order of eviction, the end of the sample first
        return tokens

    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait to."""
        running, waiting = self._scheduler.get_request_counts()
        return running, waiting

    @property
    def room(self) -> int:
        """Blocks that are free (or hold what nobody uses)."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def needed(self, tokens: int) -> int:
        """Blocks of a request with so many tokens, and the next."""
        return tokens // self._block_size + 1

    @contextmanager
    def _reached(
        self, shape: torch.Size, dtype: torch.dtype, source: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor | Shared]]:
        """A tensor, with what `source` has, and how the workers come by it until this ends: one that is in this process
        by the tensor itself; others map memory that has no name but in /proc."""
        if self._engine.vllm_config.parallel_config.world_size == 1:
            tensor = torch.empty(shape, dtype=dtype) if source is None else source
            yield tensor, tensor
            return
        descriptor = os.memfd_create("keys and values")
        try:
            os.ftruncate(descriptor, shape.numel() * dtype.itemsize)
            shared = Shared(f"/proc/{os.getpid()}/fd/{descriptor}", tuple(shape), dtype)
            tensor = shared.tensor()
            if source is not None:
                tensor.copy_(source)
            yield tensor, shared
        finally:
            os.close(descriptor)


def _another_attention(spec: Any) -> str | None:
    """Why a layer's cache is more or less than the keys and values of all tokens."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    if type(spec) is not FullAttentionSpec:
        return f"its cache is vLLM's {type(spec).__name__}, not that of attention to all tokens"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "it attends to a window, and vLLM forgets what is out of it"
    if spec.head_size != spec.head_size_v:
        return f"its keys have {spec.head_size} values and its values {spec.head_size_v}"
    if spec.kv_quant_mode != KVQuantMode.NONE:
        return "its cache is quantized"
    return None
