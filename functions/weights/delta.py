"""What changed from one version to the next, bit for bit: where, and the new values. No torch here.

    part     8 bytes (length of the head, little endian) | head | sections, end to end
    head     JSON: [[tensor, dtype, first element, changed elements, bytes of gaps], ...], one entry a section
    section  gaps | values
    gaps     per changed element the number of unchanged ones since the one before it (of the first: since `first`),
             as unsigned LEB128: 7 bits a byte, the lowest first, the highest bit set on all but the last
    values   the new elements as they are in memory

Elements are compared as bits (-0.0 differs from 0.0, a NaN does not differ from itself) and overwritten, not added to:
applying a delta twice is applying it once, and nothing rounds. In bfloat16 an optimizer step at a learning rate of 1e-6
leaves about 99 % of a policy's weights as they are, because its updates are smaller than half a unit in the last
place (PULSE, arXiv:2602.03839); at that density a changed element costs 3.3 bytes: 1.3 of position and 2 of value
(docs/decisions/0011-deltas.md has the encodings that were compared).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from functions.weights.blobs import Blob
from functions.weights.manifest import ITEM_BYTES, Manifest, block_hashes

LARGEST_SHARE = 0.3
"""A delta of more than this share of the weights' bytes is not worth its trouble: the whole version is fetched."""
SECTION_ELEMENTS = 2**24
"""Elements of a tensor that one section looks at: bounds the memory of finding and applying changes."""
PART_BYTES = 64 * 2**20
"""A part is closed when it has reached this; a section adds at most 200 MB."""
_LENGTH = 8

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Difference:
    """`parts` together are the delta; () where it would be larger than was allowed."""

    changed: int
    elements: int
    parts: tuple[bytes, ...]


def unsigned(data: memoryview | bytes, dtype: str) -> Array:
    """A tensor's bytes as unsigned integers of its elements' width."""
    return np.frombuffer(data, np.dtype(f"<u{ITEM_BYTES[dtype]}"))


def difference(
    parent: Manifest, old: Mapping[str, Blob], new: Mapping[str, Blob], *, part_bytes: int = PART_BYTES,
    section_elements: int = SECTION_ELEMENTS,
) -> Difference | None:  # fmt: skip
    """From `old`, what `parent` has of some or all of its tensors, to `new`. None where a delta would not lead from one
    to the other: names, dtypes or shapes differ, or `old` are not the bytes that `parent` has."""
    if _layout(old) != _layout(new) or not _all_of(parent, old):
        return None
    limit = LARGEST_SHARE * sum(len(blob.data) for blob in new.values())
    parts, open_part, changed, size = list[bytes](), _Part(), 0, 0
    for name, blob in new.items():
        before, after = unsigned(old[name].data, blob.dtype), unsigned(blob.data, blob.dtype)
        begin = blob.start // ITEM_BYTES[blob.dtype]
        for first in range(0, len(after), section_elements):
            chunk = after[first : first + section_elements]
            differs = chunk != before[first : first + section_elements]
            count = int(np.count_nonzero(differs))
            changed += count
            if not count or size + count * (1 + chunk.itemsize) > limit:
                size += count * (1 + chunk.itemsize)
                continue
            positions = np.flatnonzero(differs)
            gaps, values = encode_gaps(positions), chunk[positions].tobytes()
            open_part.add([name, blob.dtype, begin + first, count, len(gaps)], gaps, values)
            size += len(gaps) + len(values)
            if open_part.size >= part_bytes:
                parts.append(open_part.encode())
                open_part = _Part()
    if open_part.size or not parts:
        parts.append(open_part.encode())
    elements = sum(len(blob.data) // ITEM_BYTES[blob.dtype] for blob in new.values())
    return Difference(changed, elements, tuple(parts) if size <= limit else ())


@dataclass(frozen=True)
class Section:
    """New `values` of some elements of a tensor; `positions` in its flat order, rising."""

    tensor: str
    dtype: str
    positions: npt.NDArray[np.int64]
    values: Array
    """As unsigned integers of the elements' width."""


def decode(part: bytes) -> Iterator[Section]:
    """ValueError, naming the tensor where it is known, for bytes that are no part."""
    length = int.from_bytes(part[:_LENGTH], "little")
    at, data = _LENGTH + length, memoryview(part)
    try:
        head = json.loads(part[_LENGTH:at]) if at <= len(part) else None
        rows = [(str(n), str(d), int(f), int(c), int(g), ITEM_BYTES[d]) for n, d, f, c, g in head or ()]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not a part of a delta: {error!r}") from error
    if head is None or at + sum(gaps + count * width for *_, count, gaps, width in rows) != len(part):
        raise ValueError("not a part of a delta: its lengths do not agree")
    for name, dtype, first, count, gaps, width in rows:
        try:
            positions = first + decode_gaps(data[at : at + gaps], count)
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
        at += gaps
        yield Section(name, dtype, positions, unsigned(data[at : at + count * width], dtype))
        at += count * width


def encode_gaps(positions: npt.NDArray[np.int64]) -> bytes:
    """Of rising positions below 2^28."""
    gaps = np.diff(positions, prepend=-1).astype(np.int32) - 1
    most = int(gaps.max(initial=0))
    if most < 128:
        return gaps.astype(np.uint8).tobytes()
    sizes = np.ones(len(gaps), np.int8)
    for bits in range(7, most.bit_length(), 7):
        sizes += gaps >= 1 << bits
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    encoded = np.empty(int(ends[-1]), np.uint8)
    encoded[starts] = (gaps & 127) | ((sizes > 1) << 7)
    for number in range(1, int(sizes.max())):
        more = np.flatnonzero(sizes > number)
        rest = gaps[more] >> 7 * number
        encoded[starts[more] + number] = (rest & 127) | ((sizes[more] > number + 1) << 7)
    return encoded.tobytes()


def decode_gaps(data: memoryview | bytes, count: int) -> npt.NDArray[np.int64]:
    """ValueError for bytes that are not those of `count` gaps."""
    encoded = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(encoded < 128)
    if len(ends) != count or (count and ends[-1] != len(encoded) - 1) or (not count and len(encoded)):
        raise ValueError(f"its gaps are not those of {count} elements")
    if count == len(encoded):
        return np.cumsum(encoded, dtype=np.int64) + np.arange(count)
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
    sizes = ends - starts + 1
    if int(sizes.max()) > 4:
        raise ValueError("one of its gaps has more than 28 bits")
    gaps = (encoded[starts] & 127).astype(np.int64)
    for number in range(1, int(sizes.max())):
        more = np.flatnonzero(sizes > number)
        gaps[more] |= (encoded[starts[more] + number] & 127).astype(np.int64) << 7 * number
    return np.cumsum(gaps) + np.arange(count)


class _Part:
    def __init__(self) -> None:
        self.size = 0
        self._rows: list[list[object]] = []
        self._data: list[bytes] = []

    def add(self, row: list[object], *data: bytes) -> None:
        self._rows.append(row)
        self._data += data
        self.size += sum(map(len, data))

    def encode(self) -> bytes:
        head = json.dumps(self._rows, separators=(",", ":")).encode()
        return b"".join((len(head).to_bytes(_LENGTH, "little"), head, *self._data))


def _all_of(parent: Manifest, blobs: Mapping[str, Blob]) -> bool:
    """Whether all of the blobs are what `parent` has there."""
    entries = {entry.name: entry for entry in parent.tensors}
    for name, blob in blobs.items():
        entry = entries.get(name)
        if entry is None or (entry.dtype, entry.shape) != (blob.dtype, blob.shape):
            return False
        first, hashes = blob.start // entry.block_bytes, block_hashes(blob.data, blob.size_bytes)
        if entry.blocks[first : first + len(hashes)] != hashes:
            return False
    return True


def _layout(blobs: Mapping[str, Blob]) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    return {name: (blob.dtype, blob.shape, blob.start, len(blob.data)) for name, blob in blobs.items()}
