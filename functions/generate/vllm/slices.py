"""The ranks of a vLLM replica read a version from the exchange: each its own slices, none the whole, nobody a file.

    once           vLLM's loading of tensors that hold nothing -> what it copies of each: the rank's rows or columns
    each version   rows: those alone are read;   columns: each rank reads its share of the rows, and all swap
                   vLLM's loading of tensors that hold that alone -> the model
So whatever vLLM divides, and however, is divided here; pages of a tensor that nobody writes take no memory. Bytes of a
rank: M / t, and what all of them hold alike (HybridFlow, arXiv:2409.19256, table 2, of ranks that hold nothing yet).
Read against vLLM 0.32 (vllm.model_executor.model_loader: base_loader, reload.inplace).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from functions.base.wire import Version
from functions.exchange.base import Exchange
from functions.exchange.open import open_exchange
from functions.weights.local_copy import SOURCE
from functions.weights.manifest import Manifest, TensorEntry, read_manifest
from functions.weights.ranges import Range, read_ranges
from functions.weights.store import DTYPES

FORMAT = "rlhf_slices"
"""vLLM's `load_format`."""
REASON_BYTES = 512
"""Of what a rank tells the others of its failure."""
CHUNK_BYTES = 256 * 2**20
"""Of slices that are read before they are loaded."""


@dataclass(frozen=True)
class Slices:
    """What a rank copies of a tensor: runs of elements of its flat order, or some columns of all its rows."""

    runs: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None = None


class Traced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is copied of the tensors that `over` hands out, instead of copying it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given: dict[int, tuple[str, Tensor]] = {}
        self._views: dict[str, list[Tensor]] = {}

    def over(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._given[tensor.untyped_storage().data_ptr()] = name, tensor  # kept, so that no other gets its place
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            found = self._of(args[1])
            if found is not None:
                self._note(found[0], args[1])
            return func(*args, **(kwargs or {})) if found is None else args[0]
        if not func.is_view:  # it reads the tensor in a way that is not known: all of it is wanted
            for given in tree_leaves((args, kwargs)):
                if isinstance(given, Tensor) and (found := self._of(given)):
                    self._note(*found)
        return func(*args, **(kwargs or {}))

    def _of(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        return self._given.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None

    def _note(self, name: str, view: Tensor) -> None:
        meta = torch.empty(0, device="meta").as_strided(view.shape, view.stride(), view.storage_offset())
        self._views.setdefault(name, []).append(meta)

    def slices(self, entries: Mapping[str, TensorEntry], rank: int, size: int) -> dict[str, Slices]:
        """Of the tensors of which something was copied."""
        return {name: _slices(entries[name].shape, views, rank, size) for name, views in self._views.items()}


def _slices(shape: Sequence[int], views: Sequence[Tensor], rank: int, size: int) -> Slices:
    width = shape[1] // size if len(shape) == 2 and size > 1 and not shape[1] % size else 0
    if width and all((v.shape, v.stride(), v.storage_offset()) == _columns(shape, width, rank) for v in views):
        return Slices((), (rank * width, (rank + 1) * width))
    runs = list[tuple[int, int]]()
    for view in sorted(views, key=Tensor.storage_offset):
        low = int(view.storage_offset())
        high = low + 1 + int(sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True)))
        if runs and low <= runs[-1][1]:
            low, high = runs[-1][0], max(high, runs.pop()[1])
        runs.append((low, high))
    return Slices(tuple(runs))


def _columns(shape: Sequence[int], width: int, rank: int) -> object:
    return (shape[0], width), (shape[1], 1), rank * width


@functools.cache
def _opened(url: str, job: str) -> Exchange:
    return open_exchange(url, job)


def source(directory: Path) -> tuple[Exchange, Manifest] | None:
    """Where the weights lie of which `directory` has holes; None where it has the weights."""
    if not (directory / SOURCE).is_file():
        return None
    said = json.loads((directory / SOURCE).read_bytes())
    exchange = _opened(said["exchange"], said["job"])
    return exchange, read_manifest(exchange, Version.from_json(said["version"]))


@register_model_loader(FORMAT)
class SliceLoader(DummyModelLoader):  # type: ignore[misc]
    """Starts with any weights; `reload_weights` then brings those of a directory's version."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        if model_config.quantization is not None:
            raise ValueError("weights that are quantized are not read in slices")
        super().load_weights(model, model_config)
        found = source(Path(model_config.model))
        assert found is not None, "of a directory with holes"
        entries = {entry.name: entry for entry in found[1].tensors}
        group, traced = get_tp_group(), Traced()
        with traced:
            model.load_weights(traced.over((name, _empty(entry)) for name, entry in entries.items()))  # type: ignore[operator]
        model.rlhf_slices = traced.slices(entries, group.rank_in_group, group.world_size)  # type: ignore[assignment]
        model.rlhf_read = 0  # type: ignore[assignment]

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Tensors that hold what this rank copies of them, and nothing else. Raises Corrupt as read_ranges does."""
        found = source(Path(model_config.model))
        assert found is not None, "of a directory with holes"
        kept: Any = model
        exchange, manifest = found
        chunk, size = list[TensorEntry](), 0
        with _together() as whole_so_far:
            for entry in manifest.tensors:
                size += entry.size_bytes // get_tp_group().world_size  # also of what others hold: chunks are the same
                if entry.name in kept.rlhf_slices:
                    chunk.append(entry)
                if size >= CHUNK_BYTES or entry is manifest.tensors[-1]:
                    tensors = _read(exchange, manifest, chunk, kept)
                    whole_so_far()
                    for entry in chunk:  # in the same order on all ranks
                        if (columns := kept.rlhf_slices[entry.name].columns) is not None:
                            tensors[entry.name] = _swapped(tensors[entry.name], columns)
                    yield from tensors.items()
                    chunk, size = [], 0


def _read(exchange: Exchange, manifest: Manifest, chunk: Sequence[TensorEntry], model: Any) -> dict[str, Tensor]:
    """The rank's slices of each; of one that goes by columns its share of the rows."""
    group, wanted = get_tp_group(), list[Range]()
    for entry in chunk:
        slices: Slices = model.rlhf_slices[entry.name]
        item = entry.size_bytes // max(1, math.prod(entry.shape))
        runs = slices.runs
        if slices.columns is not None:
            rows = _rows(entry.shape[0], group.world_size)[group.rank_in_group]
            runs = ((rows[0] * entry.shape[1], rows[1] * entry.shape[1]),)
        wanted += [Range(entry, start * item, stop * item) for start, stop in runs]
    model.rlhf_read += sum(asked.last - asked.first for asked in wanted if asked.start < asked.stop)
    tensors = {entry.name: _empty(entry) for entry in chunk}
    for asked, data in read_ranges(exchange, manifest, wanted):
        flat = tensors[asked.entry.name].view(-1).view(torch.uint8).numpy()
        flat[asked.start : asked.stop] = np.frombuffer(data, np.uint8)
    return tensors


@contextmanager
def _together() -> Iterator[Callable[[], None]]:
    """Ranks that swap: where one fails all do, when they next ask whether all goes well, or at the end."""
    group = get_tp_group()

    def ask(why: str = "") -> None:
        own = torch.frombuffer(bytearray(why.encode()[:REASON_BYTES].ljust(REASON_BYTES)), dtype=torch.uint8)
        told = [torch.empty_like(own) for _ in range(group.world_size)]
        dist.all_gather(told, own, group=group.cpu_group)
        texts = [found.numpy().tobytes().decode(errors="replace").strip() for found in told]
        if any(texts) and not why:
            raise PeerFailed("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))

    try:
        yield ask
        ask()
    except PeerFailed:
        raise
    except BaseException as error:
        ask(f"{type(error).__name__} {error}")
        raise


class PeerFailed(RuntimeError):
    """What another rank says."""


def _swapped(tensor: Tensor, columns: tuple[int, int]) -> Tensor:
    """From a tensor that holds this rank's share of the rows to one that holds its columns of all of them."""
    group, width = get_tp_group(), columns[1] - columns[0]
    shares = _rows(tensor.shape[0], group.world_size)
    low, high = shares[group.rank_in_group]
    sent = torch.cat([part.reshape(-1) for part in tensor[low:high].chunk(group.world_size, 1)]).view(torch.uint8)
    row_bytes = width * tensor.element_size()
    counts = [(last - first) * row_bytes for first, last in shares]
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent, counts, [(high - low) * row_bytes] * group.world_size, group=group.cpu_group)
    found = torch.empty_like(tensor)
    found[:, columns[0] : columns[1]] = received.view(tensor.dtype).view(-1, width)
    return found


def _rows(count: int, size: int) -> list[tuple[int, int]]:
    return [(count * place // size, count * (place + 1) // size) for place in range(size)]


def _empty(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")


def sampled_blocks(directory: Path) -> Iterator[tuple[str, tuple[int, ...], Tensor, Tensor]] | None:
    """A block of each tensor of numbers with a point, at random: name, shape, positions and values, checked. None
    where `directory` has the weights."""
    found = source(directory)
    return None if found is None else _sampled(*found)


def _sampled(exchange: Exchange, manifest: Manifest) -> Iterator[tuple[str, tuple[int, ...], Tensor, Tensor]]:
    rng, wanted = np.random.default_rng(), list[Range]()
    for entry in manifest.tensors:
        if entry.blocks and DTYPES[entry.dtype].is_floating_point:
            start = int(rng.integers(len(entry.blocks))) * entry.block_bytes
            wanted.append(Range(entry, start, min(start + entry.block_bytes, entry.size_bytes)))
    for asked, data in read_ranges(exchange, manifest, wanted):
        values = torch.frombuffer(bytearray(data), dtype=DTYPES[asked.entry.dtype])
        first = asked.start // values.element_size()
        yield asked.entry.name, asked.entry.shape, torch.arange(first, first + len(values)), values
