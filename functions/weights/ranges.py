"""Bytes of tensors from the exchange, whole or in part, every block checked against its hash. No torch here."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from functions.exchange.base import Corrupt, Exchange, NotFound
from functions.weights.blobs import TRANSFERS
from functions.weights.manifest import Manifest, Piece, TensorEntry, block_hashes, label

READ_BYTES = 64 * 2**20
"""Most bytes of neighbours that are read together: with TRANSFERS of them on their way, as much as one shard."""


@dataclass(frozen=True)
class Range:
    """Bytes `start` to `stop` of a tensor."""

    entry: TensorEntry
    start: int
    stop: int

    @property
    def first(self) -> int:
        """Where its first block begins,"""
        return self.start // self.entry.block_bytes * self.entry.block_bytes

    @property
    def last(self) -> int:
        """and where its last one ends: what is read."""
        return min(-(-self.stop // self.entry.block_bytes) * self.entry.block_bytes, self.entry.size_bytes)

    def pieces(self) -> list[Piece]:
        return self.entry.pieces_of(self.first, self.last)


def read_blobs(
    exchange: Exchange, manifest: Manifest, entries: Iterable[TensorEntry]
) -> Iterator[tuple[TensorEntry, memoryview]]:
    """The bytes of `entries`, about in the order in which they lie. Raises as `read_ranges` does."""
    wanted = (Range(entry, 0, entry.size_bytes) for entry in entries)
    yield from ((found.entry, data) for found, data in read_ranges(exchange, manifest, wanted))


def read_ranges(
    exchange: Exchange, manifest: Manifest, ranges: Iterable[Range]
) -> Iterator[tuple[Range, memoryview]]:  # fmt: skip
    """The bytes of `ranges`, about in the order in which they lie: neighbours in one read, and nothing but the blocks
    that they touch.

    Raises Corrupt naming version, tensor and shard where bytes are not those that were published, or are gone.
    """
    wanted = list(ranges)
    yield from ((empty, memoryview(b"")) for empty in wanted if empty.start >= empty.stop)
    runs = _runs(asked for asked in wanted if asked.start < asked.stop)
    coming: deque[Future[list[tuple[Range, memoryview]]]] = deque()
    with ThreadPoolExecutor(TRANSFERS) as pool:
        for run in runs:
            coming.append(pool.submit(_read, exchange.durable, manifest, run))
            if len(coming) >= TRANSFERS:
                yield from coming.popleft().result()
        while coming:
            yield from coming.popleft().result()


def _runs(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Ranges that lie end to end in one shard; one in several pieces stands alone."""
    placed = sorted(((asked.pieces(), asked) for asked in ranges), key=lambda item: (item[0][0].key, item[0][0].start))
    run: list[Range] = []
    size, end = 0, ("", 0)
    for pieces, asked in placed:
        begin, length = pieces[0], sum(piece.length for piece in pieces)
        if run and (len(pieces) > 1 or end != (begin.key, begin.start) or size + length > READ_BYTES):
            yield run
            run, size = [], 0
        run.append(asked)
        size += length
        end = (begin.key, begin.start + begin.length) if len(pieces) == 1 else ("", 0)
    if run:
        yield run


def _read(store: Exchange, manifest: Manifest, run: list[Range]) -> list[tuple[Range, memoryview]]:
    first = run[0].pieces()
    if len(run) == 1:
        data = b"".join(_get(store, manifest, run[0], piece) for piece in first)
    else:
        whole = Piece(first[0].key, first[0].start, sum(asked.last - asked.first for asked in run))
        data = _get(store, manifest, run[0], whole)
    found, at = [], 0
    for asked in run:
        part = memoryview(data)[at : at + asked.last - asked.first]
        _check(manifest, asked, part)
        found.append((asked, part[asked.start - asked.first : asked.stop - asked.first]))
        at += len(part)
    return found


def _get(store: Exchange, manifest: Manifest, asked: Range, piece: Piece) -> bytes:
    who = f"weights {label(manifest.version)}, tensor {asked.entry.name!r}"
    try:
        return store.get(piece.key, start=piece.start, length=piece.length)
    except NotFound as error:
        raise Corrupt(f"{who}: its bytes are gone ({error})") from error
    except ValueError as error:  # a range outside the value: it was truncated
        raise Corrupt(f"{who}: its bytes are truncated ({error})") from error


def _check(manifest: Manifest, asked: Range, data: memoryview) -> None:
    step, size = asked.entry.block_bytes, asked.entry.size_bytes
    wanted = asked.entry.blocks[asked.first // step :]
    for number, (have, want) in enumerate(zip(block_hashes(data, size), wanted, strict=False)):
        if have != want:
            start = asked.first + number * step
            stop = min(start + step, size)
            keys = ", ".join(dict.fromkeys(piece.key for piece in asked.entry.pieces_of(start, stop)))
            who = f"weights {label(manifest.version)}, tensor {asked.entry.name!r}"
            raise Corrupt(f"{who}: bytes {start} to {stop}, in {keys}, are not those published")
