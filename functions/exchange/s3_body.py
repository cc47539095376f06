"""What S3 is sent and what its answers say: a value with its metadata, as a file object that copies nothing."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from functions.base.wire import Ref
from functions.exchange.base import Corrupt, Data, check_key, check_lifetime, checksum, views

NONCE_BYTES = 16
Views = list[memoryview]
Marks = list[tuple[str, int]]


@dataclass(frozen=True)
class Value:
    """A value about to be written; `stored` is its content and, with a lifetime, the nonce."""

    ref: Ref
    stored: Views
    stored_bytes: int
    expires_ms: int
    """Unix time; 0 when the value has no end."""
    writer: str

    @classmethod
    def of(cls, key: str, data: Data, lifetime_s: float | None) -> Value:
        buffers = views(data)
        lifetime = check_lifetime(key, lifetime_s)
        size = sum(view.nbytes for view in buffers)
        ref = Ref(check_key(key), size, checksum(*buffers))
        writer = uuid.uuid4().hex
        if lifetime is None:
            return cls(ref, buffers, size, 0, writer)
        nonce = memoryview(os.urandom(NONCE_BYTES))
        return cls(ref, [*buffers, nonce], size + NONCE_BYTES, int((time.time() + lifetime) * 1000), writer)

    @property
    def metadata(self) -> dict[str, str]:
        size, expires = str(self.ref.size_bytes), str(self.expires_ms)
        return {"size": size, "xxh3": self.ref.checksum, "expires": expires, "writer": self.writer}


@dataclass(frozen=True)
class Head:
    """What an object's metadata says of it."""

    size_bytes: int
    checksum: str
    expires_ms: int
    writer: str
    etag: str

    @classmethod
    def read(cls, key: str, response: Mapping[str, Any]) -> Head:
        """From the answer to GET (of a range too) or HEAD; raises Corrupt."""
        metadata = response["Metadata"]
        stored = int(response.get("ContentRange", "").rpartition("/")[2] or response["ContentLength"])
        try:
            size, expires = int(metadata["size"]), int(metadata["expires"])
            head = cls(size, metadata["xxh3"], expires, metadata["writer"], response["ETag"])
        except (KeyError, ValueError) as error:
            raise Corrupt(f"{key}: the object was not written by an exchange, or lost its metadata") from error
        if stored != size + (NONCE_BYTES if expires else 0):
            raise Corrupt(f"{key}: truncated or altered in S3: {stored} bytes stored for a value of {size}")
        return head

    @property
    def expired(self) -> bool:
        return 0 < self.expires_ms <= time.time() * 1000


class Body:
    """A readable, seekable file over buffers. `read` returns views of them: sockets and hashes take those as well."""

    def __init__(self, stored: Views) -> None:
        self.stored = stored
        self.size = sum(view.nbytes for view in stored)
        self.at = 0

    def __len__(self) -> int:
        return self.size

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes | memoryview:
        """At most `size` bytes, b"" at the end; never across two buffers, so it may be fewer. All where size < 0."""
        if size < 0:
            rest = b"".join(self.stored)[self.at :]
            self.at = self.size
            return rest
        start = 0
        for view in self.stored:
            if self.at < start + view.nbytes:
                piece = view[self.at - start : self.at - start + size]
                self.at += piece.nbytes
                return piece
            start += view.nbytes
        return b""


JOIN_BYTES = 4 << 20


def body(stored: Views) -> bytes | Body:
    """Bytes where that costs no copy or a small one, else a file object."""
    whole = stored[0].obj if len(stored) == 1 else None
    if isinstance(whole, bytes) and len(whole) == stored[0].nbytes:
        return whole
    return b"".join(stored) if sum(view.nbytes for view in stored) <= JOIN_BYTES else Body(stored)


def parts(stored: Views, part_bytes: int) -> Iterator[Views]:
    """The buffers cut into parts of exactly `part_bytes` (the last may be shorter), without a copy."""
    part: Views = []
    room = part_bytes
    for view in stored:
        while view.nbytes:
            piece, view = view[:room], view[room:]
            part.append(piece)
            room -= piece.nbytes
            if room == 0:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def mark_key(key: str, expires_ms: int) -> str:
    return f"+expires/{key}@{expires_ms}"


def parse_mark(name: str) -> Marks:
    """[(key, expires_ms)] of a mark's name below the root; [] of a name that is none."""
    key, _, expires = name.removeprefix("+expires/").rpartition("@")
    return [(key, int(expires))] if key and expires.isdigit() else []
