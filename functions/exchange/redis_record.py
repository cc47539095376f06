"""How a value is written in Redis: its header, and the transaction that sends a long one piece by piece."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import xxhash

from functions.exchange.base import Corrupt
from functions.exchange.resp import Packed, command

PIECE_BYTES = 1 << 20
Expiry = tuple[str | int, ...]


@dataclass(frozen=True)
class Header:
    """First line of every record, HEADER_BYTES long.

    `place`: "i" the value follows the header; "a" it lies under `<key>#`; of a tiered exchange also "s": it lies in
    S3 only; "c": it follows the header and lies in S3 too.
    """

    size_bytes: int
    checksum: str
    writer: str
    place: str

    def encode(self) -> bytes:
        return f"exchange size={self.size_bytes:012d} xxh3={self.checksum} by={self.writer} at={self.place}\n".encode()

    @classmethod
    def decode(cls, key: str, record: bytes) -> Header:
        try:
            fields = dict(field.split("=") for field in record[:HEADER_BYTES].decode().split()[1:])
            header = cls(int(fields["size"]), fields["xxh3"], fields["by"], fields["at"])
        except (ValueError, KeyError) as error:
            raise Corrupt(f"{key}: its record in Redis was altered (no header)") from error
        if header.encode() != record[:HEADER_BYTES]:
            raise Corrupt(f"{key}: its record in Redis was altered (header)")
        return header


HEADER_BYTES = len(Header(0, "0" * 32, "0" * 8, "i").encode())


@dataclass
class LargeValue:
    """A value that lies apart from its header. Its checksum is computed while it is sent, piece by piece."""

    name: str
    buffers: list[memoryview]
    size_bytes: int
    expiry: Expiry
    checksum: str = ""

    def __post_init__(self) -> None:
        self.writer = uuid.uuid4().hex[:8]

    def transaction(self) -> list[Packed]:
        return [command("MULTI"), self._bytes(), self._header(), command("PUBLISH", self.name, ""), command("EXEC")]

    def _bytes(self) -> Packed:
        expiry = b"".join(bytes(part) for part in list(command("SET", *self.expiry))[4:])
        name = (self.name + "#").encode()
        yield b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (3 + len(self.expiry), len(name), name, self.size_bytes)
        digest = xxhash.xxh3_128()
        for view in self.buffers:
            for at in range(0, view.nbytes, PIECE_BYTES):
                piece = view[at : at + PIECE_BYTES]
                digest.update(piece)
                yield piece
        self.checksum = digest.hexdigest()
        yield b"\r\n" + expiry

    def _header(self) -> Packed:
        header = Header(self.size_bytes, self.checksum, self.writer, "a")
        yield from command("SET", self.name, header.encode(), *self.expiry)
