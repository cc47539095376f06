"""What a published version consists of: one JSON manifest, written last. No torch here.

    weights/policy/v000000.base/files/config.json        configuration and tokenizer, stored once, named by all
    weights/policy/v000012.3fa9/shard-00000.<hash>       raw bytes of tensors, end to end, at most 256 MB; of a gang
                                                         each rank writes its own
    weights/policy/v000012.3fa9/manifest.json            names every tensor and where its bytes lie

A version exists when its manifest exists. A manifest may name keys of earlier versions: `files` always does, and a
kind of version that is not "full" may do so for tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from functions.base.wire import Json, Ref, Version, WireError
from functions.exchange.base import Corrupt, Exchange, NotFound, checksum

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of the dtypes that a version can hold, by the names of the safetensors format."""


SMALLEST_BLOCK, LARGEST_BLOCK = 2**14, 2**20


def block_bytes(size_bytes: int) -> int:
    """A tensor of `size_bytes` is hashed in blocks of so many, counted from its first byte: whoever reads a part of it
    reads the blocks that the part touches, and can check them.

    About 64 blocks a tensor, so that the rows of a rank, which begin and end within blocks, are read with little else
    and that writing can be dealt evenly; a power of two, as rows mostly are, so that they often begin with a block. Not
    more than 1 MiB: of a 7B model (Llama's shapes) no rank of eight reads more than 1.6 % in vain, of nine 8 %. Not
    smaller or more: each costs 32 characters of the manifest, 3.0 MB at 7B with masters and moments.
    """
    wanted = -(-size_bytes // 64)
    return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << max(0, wanted - 1).bit_length()))


@dataclass(frozen=True)
class Piece:
    """`length` bytes from `start` of the value under `key`."""

    key: str
    start: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a version. Its bytes are the pieces' end to end: more than one above the shard limit, and where
    several ranks have written it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    blocks: tuple[str, ...]
    """xxh3-128 of each of its blocks, in hexadecimal."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Along dimension 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def block_bytes(self) -> int:
        """Of each of its blocks but the last, which may be shorter."""
        return block_bytes(self.size_bytes)

    @property
    def hash(self) -> str:
        """What the tensor's bytes are: the same as `tensor_hash` of them."""
        return _joined(self.blocks)

    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        """Where its bytes from `start` to `stop` lie."""
        found, at = list[Piece](), 0
        for piece in self.pieces:
            low, high = max(start, at), min(stop, at + piece.length)
            if low < high:
                found.append(Piece(piece.key, piece.start + low - at, high - low))
            at += piece.length
        return found

    def to_json(self) -> list[Any]:
        pieces = [[p.key, p.start, p.length] for p in self.pieces]
        return [self.name, self.dtype, list(self.shape), pieces, "".join(self.blocks)]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorEntry:
        name, dtype, shape, pieces, digests = value
        entry = cls(name, dtype, tuple(shape), tuple(Piece(*p) for p in pieces), split_hashes(digests))
        if entry.size_bytes != sum(p.length for p in entry.pieces):
            raise ValueError(f"tensor {name!r}: {dtype} {list(shape)} and the lengths of its pieces do not agree")
        if len(digests) != _HASH_LETTERS * -(-entry.size_bytes // entry.block_bytes):
            raise ValueError(f"tensor {name!r}: {dtype} {list(shape)} and the number of its blocks do not agree")
        return entry


_HASH_LETTERS = 32


def block_hashes(data: memoryview | bytes, size_bytes: int | None = None) -> tuple[str, ...]:
    """Of a tensor's bytes; of a part that begins with a block where the tensor has `size_bytes`."""
    step = block_bytes(len(data) if size_bytes is None else size_bytes)
    return tuple(checksum(data[at : at + step]) for at in range(0, len(data), step))


def split_hashes(digests: str) -> tuple[str, ...]:
    """Hashes that were written end to end."""
    return tuple(digests[at : at + _HASH_LETTERS] for at in range(0, len(digests), _HASH_LETTERS))


def tensor_hash(data: memoryview | bytes) -> str:
    """xxh3-128 of a tensor's bytes where they are one block, of its blocks' hashes where they are several."""
    return _joined(block_hashes(data))


def _joined(blocks: Sequence[str]) -> str:
    return blocks[0] if len(blocks) == 1 else checksum("".join(blocks).encode())


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapters on top of the full version `base`: W + (alpha / rank) B A for each pair of tensors."""

    base: Version
    rank: int
    alpha: float
    targets: tuple[str, ...]

    def to_json(self) -> Json:
        return {"base": self.base.to_json(), "rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}

    @classmethod
    def from_json(cls, value: Json) -> Adapter:
        return cls(Version.from_json(value["base"]), value["rank"], value["alpha"], tuple(value["targets"]))


@dataclass(frozen=True)
class Manifest:
    """`state` is the optimizer's, `trainer` the rest of what training resumes from (step count and the like)."""

    version: Version
    parent: Version | None
    tensors: tuple[TensorEntry, ...]
    state: tuple[TensorEntry, ...] = ()
    trainer: Json = field(default_factory=dict)
    files: Mapping[str, Ref] = field(default_factory=dict)
    """Files of the model directory beside the weights (config.json, tokenizer.json, ...), by name."""
    adapter: Adapter | None = None
    """Where there is one, `tensors` are adapters alone (kind "lora"); else they are the whole model (kind "full")."""
    delta: tuple[Ref, ...] = ()
    """The parts of what changed in `tensors` since `parent` (functions/weights/delta.py); () where there is none."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights, without the optimizer's state."""
        return sum(entry.size_bytes for entry in self.tensors)

    def keys(self) -> set[str]:
        """Every key that this version names, the manifest's own included (an adapter's base has its own)."""
        pieces = {p.key for entry in (*self.tensors, *self.state) for p in entry.pieces}
        refs = {ref.key for ref in (*self.files.values(), *self.delta)}
        return pieces | refs | {manifest_key(self.version)}

    def encode(self) -> bytes:
        value = {
            "kind": "full" if self.adapter is None else "lora",
            "adapter": None if self.adapter is None else self.adapter.to_json(),
            "version": self.version.to_json(),
            "parent": None if self.parent is None else self.parent.to_json(),
            "tensors": [entry.to_json() for entry in self.tensors],
            "state": [entry.to_json() for entry in self.state],
            "trainer": self.trainer,
            "files": {name: ref.to_json() for name, ref in self.files.items()},
            "delta": [ref.to_json() for ref in self.delta],
        }
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises WireError for bytes that are no manifest of a kind known here."""
        try:
            value = json.loads(data)
            if value["kind"] not in ("full", "lora"):
                raise WireError(f"a version of kind {value['kind']!r} cannot be read here (known: full, lora)")
            return cls(
                version=Version.from_json(value["version"]),
                parent=None if value["parent"] is None else Version.from_json(value["parent"]),
                tensors=tuple(TensorEntry.from_json(e) for e in value["tensors"]),
                state=tuple(TensorEntry.from_json(e) for e in value["state"]),
                trainer=value["trainer"],
                files={name: Ref.from_json(ref) for name, ref in value["files"].items()},
                adapter=None if value["adapter"] is None else Adapter.from_json(value["adapter"]),
                delta=tuple(Ref.from_json(ref) for ref in value["delta"]),
            )
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise WireError(f"not a manifest: {error!r}") from error


def label(version: Version) -> str:
    """A version in messages: `policy v000012.3fa9`."""
    return f"{version.model} v{version.number:06d}.{version.call}"


def manifest_key(version: Version) -> str:
    return f"{version.prefix}manifest.json"


def read_manifest(exchange: Exchange, version: Version) -> Manifest:
    """Raises NotFound when the version was never published, or only half; Corrupt when the manifest is another's."""
    try:
        data = exchange.durable.get(manifest_key(version))
    except NotFound as error:
        raise NotFound(f"weights {label(version)}: no manifest, the version was never (wholly) published") from error
    try:
        manifest = Manifest.decode(data)
    except (WireError, ValueError) as error:
        raise Corrupt(f"weights {label(version)}: {error}") from error
    if manifest.version != version:
        raise Corrupt(f"weights {label(version)}: the manifest is that of {label(manifest.version)}")
    return manifest


def keep_only(exchange: Exchange, model: str, versions: Iterable[Version]) -> int:
    """Deletes every version of `model` up to the newest of `versions` but those; how many keys went.

    What a kept version needs of another one stays. Numbers above the newest kept are left alone: they may be in the
    making. A version's manifest goes first, so that a half-deleted version is NotFound, never Corrupt.
    """
    kept = list(versions)
    if not kept:
        return 0
    manifests = [read_manifest(exchange, version) for version in kept]
    manifests += [read_manifest(exchange, m.adapter.base) for m in manifests if m.adapter is not None]
    needed = set[str]().union(*(manifest.keys() for manifest in manifests))
    newest, store, root, gone = max(v.number for v in kept), exchange.durable, f"weights/{model}/", 0
    keys = [k for k in store.list(root) if k not in needed and _number(k.removeprefix(root)) <= newest]
    for key in sorted(keys, key=lambda k: not k.endswith("/manifest.json")):
        if any(other != key and other.startswith(key) for other in needed):
            continue  # delete() takes a prefix: this one would take a needed key along
        gone += store.delete(key)
    return gone


def _number(inside: str) -> int:
    return int(inside.split("/", 1)[0].split(".", 1)[0].removeprefix("v"))
