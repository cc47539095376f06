"""What one rank of a gang has of a version: the rows that its mesh gives it, read from the exchange and written to it.

    rows of a tensor    | rank 0      | rank 1      | rank 2      |     along dimension 0, as torch.chunk deals them
    its blocks          |    0    |    1    |    2    |    3      |     up to 1 MiB (functions/weights/manifest.py)
    rank 1 reads                  [---- 1, 2 -----------]               the blocks that hold its rows
    rank 1 writes                           [--- 2 ---]                 the blocks that begin in its rows
So a version's blocks, and their hashes, are the same whatever mesh wrote it, and any other reads it. A rank whose rows
begin within a block sends the bytes up to that block's end to the rank that writes it. Where tp divides columns, its
ranks read and write rows all the same, and swap them for columns among themselves (one all-to-all a tensor).
"""

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
    exchange: Exchange, manifest: Manifest, wanted: Iterable[tuple[TensorEntry, Tensor]], ranks: Ranks,
    kept: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """What this rank holds of each entry, by name, on the CPU where it was read: of one beside a sharded tensor as that
    is sharded, else all. What is `kept` (kept.py) is not read. All ranks call it with the same entries. Raises
    Corrupt, as `fetch` of functions/weights/store.py."""
    likes = {entry.name: (entry, like) for entry, like in wanted}
    yield from ((name, kept[name]) for name in likes if name in kept)
    likes = {name: found for name, found in likes.items() if name not in kept}
    asked, swapped = list[tuple[TensorEntry, int, int]](), dict[str, Tensor]()
    for entry, like in likes.values():
        asked.append((entry, *(_held(like, ranks) if isinstance(like, DTensor) else (0, entry.rows))))
    for name, rows in fetch_rows(exchange, manifest, asked):
        if _by_columns(likes[name][1]):
            swapped[name] = rows  # they come in an order of their own on each rank
        else:
            yield name, rows
    for name in likes:
        if name in swapped:
            yield name, _columns(swapped.pop(name), likes[name][0].shape, ranks)


def own_blocks(tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> dict[str, Blob]:
    """The blocks that this rank writes of each tensor; of one that is not sharded, rank 0 all. All ranks that hold a
    part of one call it with the same names in the same order, and wait for each other.
    """
    found: dict[str, Blob] = {}
    for name, tensor in tensors:
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


def transfers(edges: Mapping[int, tuple[int, int]]) -> list[Transfer]:
    """What is sent of a tensor whose bytes lie so in the rows of each rank, in the order of bytes."""
    found, step = [], block_bytes(max(stop for _, stop in edges.values()))
    for source, (low, high) in sorted(edges.items(), key=lambda item: item[1]):
        block = low // step * step
        stop = min(block + step, high)
        if block < low < stop:
            target = next(rank for rank, (first, last) in edges.items() if first <= block < last)
            found.append(Transfer(source, target, low, stop))
    return found


def _own_bytes(tensor: DTensor, ranks: Ranks) -> tuple[int, Tensor]:
    """Where the blocks that this rank writes begin, and their bytes."""
    rows = tensor.to_local().detach()
    if _by_columns(tensor):
        rows = _rows(rows, ranks)
    row_bytes = tensor.numel() // max(1, tensor.shape[0]) * tensor.element_size()
    edges = {rank: (low * row_bytes, high * row_bytes) for rank, (low, high) in _writers(tensor, ranks).items()}
    low, high = edges.get(ranks.rank, (0, 0))
    local = rows.contiguous().view(-1).view(torch.uint8)[: high - low]
    assert local.numel() == high - low, "FSDP2 deals rows as torch.chunk does"
    sent = list[dist.P2POp]()
    received = list[Tensor]()
    for move in transfers(edges):
        if move.source == ranks.rank:
            sent.append(dist.P2POp(dist.isend, local[move.start - low : move.stop - low].clone(), move.target))
        elif move.target == ranks.rank:
            received.append(torch.empty(move.stop - move.start, dtype=torch.uint8, device=local.device))
            sent.append(dist.P2POp(dist.irecv, received[-1], move.source))
    for work in dist.batch_isend_irecv(sent) if sent else ():
        work.wait()
    step = block_bytes(tensor.numel() * tensor.element_size())
    start = min(-(-low // step) * step, high)
    own = local[start - low :]
    return start, torch.cat((own, *received)) if received else own


def _part(rows: tuple[int, int], size: int, place: int) -> tuple[int, int]:
    low, high = rows
    first, last = rows_of(high - low, size)[place]
    return low + first, low + last


def _by_columns(tensor: Tensor) -> bool:
    """Whether tp divides its columns."""
    return isinstance(tensor, DTensor) and tensor.placements[-1].is_shard(1)


def _rows_at(tensor: DTensor, ranks: Ranks, dp: int, tp: int) -> tuple[int, int]:
    """The rows that the rank at this place of the mesh reads and writes (functions/train/parallel.py: shard)."""
    sizes, rows, over = (ranks.shard[1], ranks.count("tp")), (0, tensor.shape[0]), tensor.placements[-1]
    if tensor.device_mesh.mesh_dim_names == ("dp_cp_tp",):
        return _part(rows, sizes[0] * sizes[1], dp * sizes[1] + tp)
    if tensor.device_mesh.ndim == 1 or over.is_replicate():
        return _part(rows, sizes[0], dp)
    if over.is_shard(0):
        return _part(_part(rows, sizes[1], tp), sizes[0], dp)
    return _part(_part(rows, sizes[0], dp), sizes[1], tp)


def _held(tensor: DTensor, ranks: Ranks) -> tuple[int, int]:
    return _rows_at(tensor, ranks, ranks.shard[0], ranks.place("tp"))


def _writers(tensor: DTensor, ranks: Ranks) -> dict[int, tuple[int, int]]:
    """The rows that each rank writes: of what all of tp hold alike, the first of them."""
    assert ranks.mesh is not None, "of a gang"
    places: Tensor = ranks.mesh.mesh[ranks.place("pp")].flatten(0, 1)
    alike = tensor.device_mesh.mesh_dim_names != ("dp_cp_tp",) and (
        tensor.device_mesh.ndim == 1 or tensor.placements[-1].is_replicate()
    )
    return {
        int(places[dp, tp]): _rows_at(tensor, ranks, dp, tp)
        for dp in range(ranks.shard[1])
        for tp in range(1 if alike else ranks.count("tp"))
    }


def _columns(rows: Tensor, shape: Sequence[int], ranks: Ranks) -> Tensor:
    """From the rows that this rank has read of a tensor of `shape` to its columns of the rows of all of tp."""
    size = ranks.count("tp")
    low, high = rows_of(shape[0], ranks.count("dp"))[ranks.place("dp")]
    counts = [last - first for first, last in rows_of(high - low, size)]
    sent = torch.cat([part.reshape(-1) for part in rows.to(ranks.device).chunk(size, 1)])
    width = shape[1] // size
    return ranks.swap(sent, [rows.shape[0] * width] * size, [count * width for count in counts], "tp").view(-1, width)


def _rows(columns: Tensor, ranks: Ranks) -> Tensor:
    """The other way: whole rows, of those that this rank writes."""
    size, width = ranks.count("tp"), columns.shape[1]
    counts = [last - first for first, last in rows_of(columns.shape[0], size)]
    own = counts[ranks.place("tp")]
    found = ranks.swap(columns.reshape(-1), [count * width for count in counts], [own * width] * size, "tp")
    return torch.cat(list(found.view(size, own, width)), 1)
