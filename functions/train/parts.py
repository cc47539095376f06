"""What one rank of a gang has of a version: the rows that FSDP2 gives it, read from the exchange and written to it.

    rows of a tensor    | rank 0      | rank 1      | rank 2      |     along dimension 0, as torch.chunk deals them
    its blocks          |    0    |    1    |    2    |    3      |     up to 1 MiB (functions/weights/manifest.py)
    rank 1 reads                  [---- 1, 2 -----------]               the blocks that hold its rows
    rank 1 writes                           [--- 2 ---]                 the blocks that begin in its rows
So a version's blocks, and their hashes, are the same whatever number of ranks wrote it, and a gang of any other size
reads it. A rank whose rows begin within a block sends the bytes up to that block's end to the rank that writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from functions.exchange.base import Exchange
from functions.train.gang import Ranks
from functions.weights.blobs import Blob
from functions.weights.manifest import Manifest, TensorEntry, block_bytes
from functions.weights.store import fetch_rows, stored_dtype, whole_blob


def rows_of(count: int, size: int) -> list[tuple[int, int]]:
    """The rows of each of `size` ranks, of a tensor with `count` of them: torch.chunk's, the last may have none."""
    each = -(-count // size)
    return [(min(rank * each, count), min((rank + 1) * each, count)) for rank in range(size)]


def fetch_own(
    exchange: Exchange, manifest: Manifest, entries: Iterable[TensorEntry], ranks: Ranks
) -> Iterator[tuple[str, Tensor]]:
    """The rank's rows of each entry, by name, on the CPU. Raises Corrupt, as `fetch` of functions/weights/store.py."""
    place, size = ranks.place("dp"), ranks.count("dp")
    rows = [(entry, *rows_of(entry.rows, size)[place]) for entry in entries]
    return fetch_rows(exchange, manifest, rows)


def own_blocks(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Blob]:
    """The blocks that this rank writes of each tensor; of one that is not sharded, rank 0 all. All ranks call it with
    the same names in the same order, and wait for each other.
    """
    found: dict[str, Blob] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if ranks.writes:
                found[name] = whole_blob(name, tensor)
            continue
        start, data = _own_bytes(tensor, ranks)
        if data.numel() or (ranks.writes and not tensor.numel()):
            shape = tuple(tensor.shape)
            found[name] = Blob(stored_dtype(name, tensor.dtype), shape, data.cpu().numpy().data, start)
    return found


@dataclass(frozen=True)
class Transfer:
    """Bytes `start` to `stop` of a tensor, which lie in the rows of `source` and in a block that `target` writes."""

    source: int
    target: int
    start: int
    stop: int


def transfers(edges: Sequence[tuple[int, int]]) -> list[Transfer]:
    """What is sent of a tensor whose bytes lie so in the rows of each rank."""
    found, step = [], block_bytes(edges[-1][1])
    for source, (low, high) in enumerate(edges):
        block = low // step * step
        stop = min(block + step, high)
        if block < low < stop:
            target = next(rank for rank, (first, last) in enumerate(edges) if first <= block < last)
            found.append(Transfer(source, target, low, stop))
    return found


def _own_bytes(tensor: DTensor, ranks: Ranks) -> tuple[int, Tensor]:
    """Where the blocks that this rank writes begin, and their bytes."""
    local = tensor.to_local().detach().contiguous().view(-1).view(torch.uint8)
    row_bytes = tensor.numel() // max(1, tensor.shape[0]) * tensor.element_size()
    edges = [(low * row_bytes, high * row_bytes) for low, high in rows_of(tensor.shape[0], ranks.count("dp"))]
    low, high = edges[ranks.place("dp")]
    assert local.numel() == high - low, "FSDP2 deals rows as torch.chunk does"
    group, sent = None if ranks.mesh is None else ranks.mesh.get_group("dp"), list[dist.P2POp]()
    received = list[Tensor]()
    for move in transfers(edges):
        if move.source == ranks.place("dp"):
            part = local[move.start - low : move.stop - low].clone()
            sent.append(dist.P2POp(dist.isend, part, group=group, group_peer=move.target))
        elif move.target == ranks.place("dp"):
            received.append(torch.empty(move.stop - move.start, dtype=torch.uint8, device=local.device))
            sent.append(dist.P2POp(dist.irecv, received[-1], group=group, group_peer=move.source))
    for work in dist.batch_isend_irecv(sent) if sent else ():
        work.wait()
    step = block_bytes(edges[-1][1])
    start = min(-(-low // step) * step, high)
    own = local[start - low :]
    return start, torch.cat((own, *received)) if received else own
