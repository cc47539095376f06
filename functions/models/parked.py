"""Tensors of a process that is parked: off the accelerator, and in no private memory of the process.

    on a GPU    storage --copy--> pinned host memory, the storage is emptied        back: filled again, same addresses
    on a CPU    storage --copy--> a mapped file without a name (memfd_create(2))    back: nothing to do, they stay there

Storages move, not tensors: views of one storage (tied weights, slices of a file) still share it afterwards, and lie at
the same offsets within a page, so that no kernel meets another alignment and computes other bits. A file's pages are
shared memory: they are no part of a fork, and a limit on private memory (keeper.py) does not count them. What lies in
the file already is not copied again: a trainer's weights and moments, changed in place, move once in its life.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class _Used:
    """The bytes of one storage that tensors use: from `start`, the beginning of a page, to `stop`."""

    tensors: tuple[Tensor, ...]
    start: int
    stop: int


class HostMemory:
    """Where one owner's tensors go when it parks."""

    def __init__(self) -> None:
        self._files: list[Tensor] = []
        """Of bytes, each a mapped file."""
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Emptied storages of an accelerator, and their bytes."""

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor]) -> None:
        """Moves all that `tensors` use; until `unpark`, those of an accelerator must not be read."""
        used = _by_storage(tensors)
        self._files = [file for file in self._files if any(_within(use, file) for use in used)]
        self._to_file([use for use in used if _on_cpu(use) and not any(_within(use, file) for file in self._files)])
        for use in used:
            if not _on_cpu(use):
                storage = use.tensors[0].untyped_storage()
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self._away.append((storage, whole.cpu().pin_memory()))
                del whole
                storage.resize_(0)
        give_back()

    @torch.no_grad()
    def unpark(self) -> None:
        """Everything where it was."""
        for storage, data in self._away:
            storage.resize_(data.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(data, non_blocking=True)
        if self._away:
            torch.cuda.synchronize()
            self._away = []

    def _to_file(self, used: list[_Used]) -> None:
        size = sum(_pages(use.stop - use.start) for use in used)
        if not size:
            return
        file, at = torch.frombuffer(mapped(size), dtype=torch.uint8), 0
        for use in used:
            old = use.tensors[0].untyped_storage()
            part = file[at : at + use.stop - use.start]
            part.copy_(torch.empty(0, dtype=torch.uint8).set_(old)[use.start : use.stop])
            for tensor in use.tensors:
                offset = at + tensor.storage_offset() * tensor.element_size() - use.start
                flat = torch.empty(0, dtype=tensor.dtype).set_(file.untyped_storage())
                tensor.data = flat.as_strided(tensor.shape, tensor.stride(), offset // tensor.element_size())
            at += _pages(use.stop - use.start)
        self._files.append(file)


def mapped(size_bytes: int) -> mmap.mmap:
    """Zeros in a file without a name: gone when the last who maps it is."""
    descriptor = os.memfd_create("parked")
    try:
        os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def give_back() -> None:
    """Memory that was freed goes back to the system, of accelerator and heap (malloc_trim(3), where there is one)."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def tensors_in(*held: Any) -> Iterator[Tensor]:
    """All tensors of modules, dataclasses, mappings and sequences, however deep."""
    for value in held:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, Mapping):
            yield from tensors_in(*value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from tensors_in(*(getattr(value, f.name) for f in fields(value)))


def _by_storage(tensors: Iterable[Tensor]) -> list[_Used]:
    found: dict[tuple[torch.device, int], dict[int, Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            storage = tensor.untyped_storage()
            found.setdefault((tensor.device, storage.data_ptr()), {})[id(tensor)] = tensor
    return [_used(tuple(sharing.values())) for sharing in found.values()]


def _used(tensors: tuple[Tensor, ...]) -> _Used:
    starts = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    stops = [start + _extent(tensor) for start, tensor in zip(starts, tensors, strict=True)]
    return _Used(tensors, min(starts) // PAGE * PAGE, max(stops))


def _extent(tensor: Tensor) -> int:
    """Bytes from its first to its last element."""
    steps = sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _on_cpu(use: _Used) -> bool:
    return use.tensors[0].device.type == "cpu"


def _within(use: _Used, file: Tensor) -> bool:
    return _on_cpu(use) and use.tensors[0].untyped_storage().data_ptr() == file.data_ptr()


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE
