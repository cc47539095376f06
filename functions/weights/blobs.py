"""Bytes of tensors to shards in the exchange, and the manifest that makes them a version. No torch here.

    write_blobs   by each writer: its part of the tensors, in shards of its own, and where everything lies
    commit        by one of them: what all have written under one manifest, put last and only if there is none
Parts begin and end with blocks (manifest.py) or with their tensor. ranges.py reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from functions.base.wire import ON_A_NODE, Json, Ref, Version, on_a_node
from functions.exchange.base import Exchange, checksum
from functions.exchange.node import NodeExchange
from functions.weights.manifest import (
    ITEM_BYTES,
    Adapter,
    Manifest,
    Piece,
    TensorEntry,
    block_hashes,
    manifest_key,
    read_manifest,
    split_hashes,
)

SHARD_BYTES = 256 * 2**20
"""Most bytes of one value: what every store takes in one put (Redis breaks at 512 MB)."""
TRANSFERS = 4
"""Values on their way at a time."""


@dataclass(frozen=True)
class Blob:
    """A tensor's bytes (C order, little endian), or a part of them."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    data: memoryview
    start: int = 0
    """Byte of the tensor with which the part begins: the first of a block."""

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorPart:
    """What one writer has of a tensor: `entry` with its pieces and blocks alone, from byte `start` on."""

    entry: TensorEntry
    start: int


@dataclass(frozen=True)
class Written:
    """What one writer has put: parts of the weights and of the optimizer's state, what changed in the former since the
    version before, and all keys."""

    tensors: tuple[TensorPart, ...]
    state: tuple[TensorPart, ...]
    delta: tuple[Ref, ...]
    keys: tuple[str, ...]
    durable: bool = True
    """Whether the state lies in the store, and not on this node alone."""

    def to_json(self) -> Json:
        kinds = {"tensors": self.tensors, "state": self.state}
        parts = {kind: [[*part.entry.to_json(), part.start] for part in found] for kind, found in kinds.items()}
        delta = [ref.to_json() for ref in self.delta]
        return parts | {"delta": delta, "keys": list(self.keys), "durable": self.durable}

    @classmethod
    def from_json(cls, value: Json) -> Written:
        def parts(rows: Sequence[Sequence[object]]) -> tuple[TensorPart, ...]:
            return tuple(_part(*row) for row in rows)  # type: ignore[arg-type]  # as to_json has it

        delta = tuple(Ref.from_json(ref) for ref in value["delta"])
        return cls(parts(value["tensors"]), parts(value["state"]), delta, tuple(value["keys"]), value["durable"])


def _part(
    name: str, dtype: str, shape: list[int], pieces: list[tuple[str, int, int]], digests: str, start: int
) -> TensorPart:
    where = tuple(Piece(*piece) for piece in pieces)
    return TensorPart(TensorEntry(name, dtype, tuple(shape), where, split_hashes(digests)), start)


def publish_blobs(
    exchange: Exchange, version: Version, *, tensors: Mapping[str, Blob], state: Mapping[str, Blob], trainer: Json,
    files: Mapping[str, Ref], parent: Version | None, adapter: Adapter | None = None, delta: Sequence[bytes] = (),
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:  # fmt: skip
    """`write_blobs` and `commit` by one writer that has all of every tensor."""
    written = write_blobs(exchange, version, tensors=tensors, state=state, delta=delta, shard_bytes=shard_bytes)
    return commit(exchange, version, [written], trainer=trainer, files=files, parent=parent, adapter=adapter)


def write_blobs(
    exchange: Exchange, version: Version, *, tensors: Mapping[str, Blob], state: Mapping[str, Blob],
    delta: Sequence[bytes] = (), shard_bytes: int = SHARD_BYTES, node: NodeExchange | None = None,
) -> Written:  # fmt: skip
    """Puts the bytes that this writer has. Nobody sees them before a manifest names them.

    `delta`: the parts of what changed in `tensors` since the version's parent (delta.py).
    `node`: where the state is held instead of in the store, as far as there is room.
    Shards and parts are named by their content, so no writer can overwrite another's bytes.
    """
    shards = _Shards(version.prefix, shard_bytes)
    placed = [shards.add(tensors)]
    if node is not None:
        shards.close()
        shards.name = ON_A_NODE
    placed.append(shards.add(state))
    shards.close()
    held = {key for key in shards.values if node is not None and on_a_node(key) and node.hold(key, shards.values[key])}
    parts = {f"{version.prefix}delta.{checksum(part)}": part for part in delta}
    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(lambda key: exchange.durable.put(key, shards.values[key]), shards.values.keys() - held))
        refs = tuple(pool.map(lambda item: exchange.durable.put(*item), parts.items()))
    return Written(shards.located(placed[0]), shards.located(placed[1]), refs, (*shards.values, *parts), not held)


def commit(
    exchange: Exchange, version: Version, written: Sequence[Written], *, trainer: Json, files: Mapping[str, Ref],
    parent: Version | None, adapter: Adapter | None = None,
) -> Manifest:  # fmt: skip
    """The manifest of what all writers have `written`, with a conditional put. Returns the manifest that counts.

    Tensors are in the first writer's order. Of several publishers of one version exactly one wins; the others get the
    winner's manifest, and what they and their fellow writers wrote is deleted. Raises ValueError for parts that are not
    the whole of a tensor.
    """
    store = exchange.durable
    manifest = Manifest(
        version=version,
        parent=parent,
        tensors=_assembled([part for writer in written for part in writer.tensors]),
        state=_assembled([part for writer in written for part in writer.state]),
        trainer=trainer,
        files=dict(files),
        adapter=adapter,
        delta=tuple(dict.fromkeys(ref for writer in written for ref in writer.delta)),
    )
    if store.put_if_absent(manifest_key(version), manifest.encode()) is not None:
        return manifest
    winner = read_manifest(exchange, version)
    for key in set[str]().union(*(writer.keys for writer in written)) - winner.keys():
        store.delete(key)
    return winner


def _assembled(parts: Sequence[TensorPart]) -> tuple[TensorEntry, ...]:
    by_name: dict[str, list[TensorPart]] = {}
    for part in parts:
        by_name.setdefault(part.entry.name, []).append(part)
    entries = []
    for name, found in by_name.items():
        found.sort(key=lambda part: part.start)
        first, at = found[0].entry, 0
        for part in found:
            if part.start != at or part.start % first.block_bytes:
                raise ValueError(f"tensor {name!r}: bytes {at} to {part.start} were written by nobody, or twice")
            at += sum(piece.length for piece in part.entry.pieces)
        if at != first.size_bytes:
            raise ValueError(f"tensor {name!r}: {at} of its {first.size_bytes} bytes were written")
        pieces = tuple(piece for part in found for piece in part.entry.pieces)
        blocks = tuple(block for part in found for block in part.entry.blocks)
        entries.append(TensorEntry(name, first.dtype, first.shape, pieces, blocks))
    return tuple(entries)


class _Shards:
    """Cuts a stream of tensors into shards. A shard's key has its content's hash, known only when it is full."""

    def __init__(self, prefix: str, limit: int) -> None:
        self.prefix, self.limit, self.name = prefix, limit, "shard-"
        self.values: dict[str, list[memoryview]] = {}
        self._keys: list[str] = []
        self._open: list[memoryview] = []
        self._size = 0

    def add(self, blobs: Mapping[str, Blob]) -> list[tuple[str, Blob, list[tuple[int, int, int]]]]:
        placed = []
        for name, blob in sorted(blobs.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]):  # stable; keeps alignment
            pieces, at = [], 0
            if self._size and self._size + len(blob.data) > self.limit:
                self.close()
            while at < len(blob.data):
                part = blob.data[at : at + self.limit]
                if self._size + len(part) > self.limit:
                    self.close()
                pieces.append((len(self._keys), self._size, len(part)))
                self._open.append(part)
                self._size += len(part)
                at += len(part)
            placed.append((name, blob, pieces))
        return placed

    def close(self) -> None:
        if self._size:
            key = f"{self.prefix}{self.name}{len(self._keys):05d}.{checksum(*self._open)}"
            self._keys.append(key)
            self.values[key] = self._open
            self._open, self._size = [], 0

    def located(self, placed: list[tuple[str, Blob, list[tuple[int, int, int]]]]) -> tuple[TensorPart, ...]:
        found = []
        for name, blob, pieces in placed:
            where = tuple(Piece(self._keys[shard], start, length) for shard, start, length in pieces)
            hashes = block_hashes(blob.data, blob.size_bytes)
            found.append(TensorPart(TensorEntry(name, blob.dtype, blob.shape, where, hashes), blob.start))
        return tuple(found)
