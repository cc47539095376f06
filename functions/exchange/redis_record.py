"""How a value is written in Redis: its header, and the transaction that writes a long one."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from functions.exchange.base import Corrupt, checksum
from functions.exchange.resp import Command, Concatenation

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


class LargeValue:
    """A value that lies apart from its header."""

    def __init__(self, name: str, buffers: list[memoryview], size_bytes: int, expiry: Expiry) -> None:
        self.name, self.size_bytes = name, size_bytes
        self.writer = uuid.uuid4().hex[:8]
        self.checksum = checksum(*buffers)
        self._buffers, self._expiry = buffers, expiry

    def transaction(self) -> list[Command]:
        header = Header(self.size_bytes, self.checksum, self.writer, "a")
        return [
            ("MULTI",),
            ("SET", self.name + "#", Concatenation(self._buffers), *self._expiry),
            ("SET", self.name, header.encode(), *self._expiry),
            ("PUBLISH", self.name, ""),
            ("EXEC",),
        ]
