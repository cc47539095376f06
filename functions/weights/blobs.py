"""Bytes of tensors to shards in the exchange and back, every tensor checked against its hash. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from functions.exchange.base import Corrupt, Exchange, NotFound, checksum
from functions.weights.manifest import (
    ITEM_BYTES,
    Adapter,
    Manifest,
    Piece,
    TensorEntry,
    label,
    manifest_key,
    read_manifest,
)
from functions.wire import Json, Ref, Version

SHARD_BYTES = 256 * 2**20
"""Most bytes of one value: what every store takes in one put (Redis breaks at 512 MB)."""
_TRANSFERS = 4


@dataclass(frozen=True)
class Blob:
    """A tensor's bytes (C order, little endian)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def publish_blobs(
    exchange: Exchange,
    version: Version,
    *,
    tensors: Mapping[str, Blob],
    state: Mapping[str, Blob],
    trainer: Json,
    files: Mapping[str, Ref],
    parent: Version | None,
    adapter: Adapter | None = None,
    delta: Sequence[bytes] = (),
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Writes the data, then the manifest with a conditional put. Returns the manifest that counts.

    `delta`: the parts of what changed since `parent`, beside the whole tensors.

    Of several publishers of one version exactly one wins; the others get the winner's manifest, and what they wrote
    is deleted. Shards are named by their content, so no publisher can overwrite another's bytes.
    """
    store = exchange.durable
    shards = _Shards(version.prefix, shard_bytes)
    entries = {kind: shards.add(blobs) for kind, blobs in (("tensors", tensors), ("state", state))}
    shards.close()
    parts = {f"{version.prefix}delta-{i:05d}.{checksum(part)}": part for i, part in enumerate(delta)}
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        list(pool.map(lambda item: store.put(*item), shards.values.items()))
        refs = tuple(pool.map(lambda item: store.put(*item), parts.items()))
    manifest = Manifest(
        version=version,
        parent=parent,
        tensors=shards.located(entries["tensors"]),
        state=shards.located(entries["state"]),
        trainer=trainer,
        files=dict(files),
        adapter=adapter,
        delta=refs,
    )
    if store.put_if_absent(manifest_key(version), manifest.encode()) is not None:
        return manifest
    winner = read_manifest(exchange, version)
    for key in {*shards.values, *parts} - winner.keys():
        store.delete(key)
    return winner


class _Shards:
    """Cuts a stream of tensors into shards. A shard's key has its content's hash, known only when it is full."""

    def __init__(self, prefix: str, limit: int) -> None:
        self.prefix, self.limit = prefix, limit
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
            key = f"{self.prefix}shard-{len(self._keys):05d}.{checksum(*self._open)}"
            self._keys.append(key)
            self.values[key] = self._open
            self._open, self._size = [], 0

    def located(self, placed: list[tuple[str, Blob, list[tuple[int, int, int]]]]) -> tuple[TensorEntry, ...]:
        return tuple(
            TensorEntry(
                name,
                blob.dtype,
                blob.shape,
                tuple(Piece(self._keys[shard], start, length) for shard, start, length in pieces),
                checksum(blob.data),
            )
            for name, blob, pieces in placed
        )


def read_blobs(
    exchange: Exchange, manifest: Manifest, entries: Iterable[TensorEntry]
) -> Iterator[tuple[TensorEntry, bytes | memoryview]]:
    """The bytes of `entries`, in the order in which they lie: neighbours in one range read, nothing else is read.

    Raises Corrupt naming version and tensor where bytes are not those that were published, or are gone.
    """
    store, wanted = exchange.durable, list(entries)
    yield from ((entry, b"") for entry in wanted if not entry.pieces)
    for run in _runs(entry for entry in wanted if entry.pieces):
        first, last = run[0].pieces[0], run[-1].pieces[-1]
        who = f"weights {label(manifest.version)}, tensor {run[0].name!r}"
        try:
            if first.key == last.key:
                length = last.start + last.length - first.start
                data = memoryview(store.get(first.key, start=first.start, length=length))
            else:
                pieces = run[0].pieces
                data = memoryview(b"".join(store.get(p.key, start=p.start, length=p.length) for p in pieces))
        except NotFound as error:
            raise Corrupt(f"{who}: its bytes are gone ({error})") from error
        except ValueError as error:  # a range outside the value: it was truncated
            raise Corrupt(f"{who}: its bytes are truncated ({error})") from error
        for entry in run:
            at = entry.pieces[0].start - first.start
            part = data[at : at + entry.size_bytes]
            if checksum(part) != entry.hash:
                raise Corrupt(f"weights {label(manifest.version)}, tensor {entry.name!r}: not the bytes published")
            yield entry, part


def _runs(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Groups of entries that lie end to end in one shard; an entry in several pieces stands alone."""
    run: list[TensorEntry] = []
    for entry in sorted(entries, key=lambda e: (e.pieces[0].key, e.pieces[0].start)):
        if run and len(entry.pieces) == len(run[0].pieces) == 1:
            end, begin = run[-1].pieces[0], entry.pieces[0]
            if (end.key, end.start + end.length) == (begin.key, begin.start):
                run.append(entry)
                continue
        if run:
            yield run
        run = [entry]
    if run:
        yield run
