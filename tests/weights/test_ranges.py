"""Several writers of one version, and readers of parts of its tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from functions.base.wire import Version
from functions.exchange.base import Corrupt
from functions.exchange.directory import DirectoryExchange
from functions.weights.blobs import Blob, Written, commit, publish_blobs, write_blobs
from functions.weights.manifest import Manifest, block_bytes, read_manifest, tensor_hash
from functions.weights.ranges import Range, read_ranges

V1 = Version("policy", 1, "aaaa")
SIZE = 40 * 2**14 + 77
"""Forty-one blocks of 16 KiB, the last with 77 bytes."""


class Counting(DirectoryExchange):
    """Counts the bytes that are read, and the reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[tuple[str, int, int]] = []

    @property
    def durable(self) -> Counting:
        return self

    def get(self, key: Any, *, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start=start, length=length)
        self.read.append((str(key), start, len(data)))
        return data


@pytest.fixture
def exchange(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def bytes_of(seed: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def blob(data: bytes, start: int = 0, stop: int | None = None) -> Blob:
    return Blob("U8", (len(data),), memoryview(data)[start:stop], start)


def written_by(exchange: Counting, cuts: list[int], names: tuple[str, ...] = ("a", "b")) -> list[Written]:
    """Each writer has the blocks from one cut to the next of every tensor."""
    found = []
    for low, high in zip([0, *cuts], [*cuts, SIZE], strict=True):
        parts = {name: blob(bytes_of(i), low, high) for i, name in enumerate(names)}
        found.append(write_blobs(exchange, V1, tensors=parts, state={}, shard_bytes=10 * 2**14))
    return [Written.from_json(w.to_json()) for w in found]


def committed(exchange: Counting, written: list[Written]) -> Manifest:
    return commit(exchange, V1, written, trainer={}, files={}, parent=None)


@pytest.mark.parametrize("cuts", [[], [2**14], [3 * 2**14, 20 * 2**14], [2**14 * k for k in range(1, 41, 4)]])
def test_a_tensor_is_the_same_whoever_wrote_its_parts(exchange: Counting, cuts: list[int], tmp_path: Path) -> None:
    whole = publish_blobs(
        DirectoryExchange(tmp_path / "whole"), V1, tensors={n: blob(bytes_of(i)) for i, n in enumerate("ab")},
        state={}, trainer={}, files={}, parent=None,
    )  # fmt: skip
    made = committed(exchange, written_by(exchange, cuts))
    assert [(e.name, e.blocks, e.hash) for e in made.tensors] == [(e.name, e.blocks, e.hash) for e in whole.tensors]
    assert [e.hash for e in made.tensors] == [tensor_hash(bytes_of(i)) for i in range(2)]
    dice = random.Random(len(cuts))
    for _ in range(40):
        entry = dice.choice(read_manifest(exchange, V1).tensors)
        low, high = sorted(dice.randrange(SIZE + 1) for _ in range(2))
        exchange.read.clear()
        ((_, data),) = read_ranges(exchange, made, [Range(entry, low, high)])
        assert bytes(data) == bytes_of("ab".index(entry.name))[low:high]
        step = block_bytes(SIZE)
        expected = min(SIZE, -(-high // step) * step) - low // step * step if low < high else 0
        assert sum(length for _, _, length in exchange.read) == expected


def test_parts_that_are_missing_or_doubled_are_no_version(exchange: Counting) -> None:
    written = written_by(exchange, [3 * 2**14, 20 * 2**14])
    for wrong in (written[:2], written[1:], [written[0], written[2]], [*written, written[1]]):
        with pytest.raises(ValueError, match="tensor 'a': "):
            committed(exchange, wrong)
    assert not [key for key in exchange.list(V1.prefix) if key.endswith("manifest.json")]


def test_neighbours_are_read_together(exchange: Counting) -> None:
    """What one writer has put end to end is one read, though it is many tensors."""
    data = {f"t{i:03d}": blob(bytes_of(i, 1000)) for i in range(100)}
    made = publish_blobs(exchange, V1, tensors=data, state={}, trainer={}, files={}, parent=None)
    exchange.read.clear()
    found = {r.entry.name: bytes(d) for r, d in read_ranges(exchange, made, [Range(e, 0, 1000) for e in made.tensors])}
    assert found == {name: bytes(b.data) for name, b in data.items()}
    assert len(exchange.read) == 1


def test_an_altered_block_is_named_with_its_bytes_and_its_shard(exchange: Counting) -> None:
    made = committed(exchange, written_by(exchange, [20 * 2**14]))
    entry = made.tensors[1]
    (piece,) = entry.pieces_of(30 * 2**14, 30 * 2**14 + 1)
    data = bytearray(exchange.get(piece.key))
    data[piece.start] ^= 1
    exchange.put(piece.key, data)
    message = rf"policy v000001\.aaaa, tensor 'b': bytes 491520 to 507904, in {piece.key}, are not those published"
    for low, high in ((0, SIZE), (30 * 2**14 + 9, 30 * 2**14 + 10), (31 * 2**14 - 1, SIZE)):
        with pytest.raises(Corrupt, match=message):
            list(read_ranges(exchange, made, [Range(entry, low, high)]))
    for low, high in ((0, 30 * 2**14), (31 * 2**14, SIZE), (5, 5)):
        ((_, part),) = read_ranges(exchange, made, [Range(entry, low, high)])
        assert bytes(part) == bytes_of(1)[low:high]
