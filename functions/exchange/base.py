"""The interface of every exchange. Keys are paths like `calls/s000012.generate.0/samples.0003`.

Guarantees, the same for every backend (tests/exchange/conformance.py):
- A reader never sees half a value: a put is atomic.
- `put_if_absent` has exactly one winner, whatever the number of writers.
- A value that was truncated or altered is refused with its key (`Corrupt`), never returned.
- A value outlives its writer; it is gone after its lifetime, or when it is deleted, whichever is first.
A key that holds a value is not also the folder of other keys (`a` and `a/b`): a directory cannot hold both.

All methods are synchronous and may be called from several threads; the orchestrator calls them in worker threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from functions.base.wire import Ref

Buffer = bytes | bytearray | memoryview
Data = Buffer | Sequence[Buffer]
"""A value: the concatenation of its buffers."""


class ExchangeError(Exception):
    """Something went wrong with the exchange; the message names the key and what would help."""


class NotFound(ExchangeError):
    """No value lies under that key (never written, deleted, or past its lifetime)."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class Corrupt(ExchangeError):
    """A value's bytes are not those that were written."""


class Unavailable(ExchangeError):
    """The store does not answer, or has no room: retrying may help. The value was not written."""

    def __init__(self, message: str, store: str = "the exchange") -> None:
        super().__init__(message)
        self.store = store
        """For people, and the same for all who use it: what is waited for."""


class Full(Unavailable):
    """The store says that it has no room."""

    def __init__(self, key: str, store: str, reason: str) -> None:
        super().__init__(f"{key}: {store} is full ({reason}); nothing was written: {MAKE_ROOM}", store)


MAKE_ROOM = (
    "make room by deleting runs that have ended with what they have in the store (DELETE /v1/jobs/ID, or the folder of "
    "their name), weights of old versions (checkpoints.keep), calls/ and batches/ of committed steps, or give it more"
)


class Unsuitable(ExchangeError):
    """The store lacks a guarantee that the exchange needs (for example, it ignores conditional puts), or refuses us
    (credentials, no such bucket): retrying does not help."""


class Exchange(Protocol):
    """Six methods. Every one raises `Unavailable` when the store is away."""

    @property
    def durable(self) -> Exchange:
        """The part of this exchange that survives the loss of every cache: the journal and weights go there."""

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        """Writes (replaces) the value; a sequence of buffers is written as their concatenation, without a copy."""

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        """Writes the value if there is none under `key`; None (and nothing written) if there is one."""

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        """The value, or `length` bytes of it from `start`. Raises NotFound, Corrupt.

        A whole read is checked against the checksum stored with the value, and against the Ref where one is given;
        a range read checks size and bounds only (ValueError outside them): its reader checks hashes of its own.
        """

    def list(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, sorted."""

    def wait(self, key: str, timeout_s: float) -> bool:
        """True as soon as there is a value under `key`; False after `timeout_s`. Timeout 0 looks once."""

    def delete(self, prefix: str) -> int:
        """Deletes all keys that begin with `prefix`; how many there were."""


def checksum(*buffers: Buffer) -> str:
    """xxh3-128 of the buffers' concatenation, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


MAX_KEY = 512
MAX_PART = 200
"""Characters of a whole key and of a part: S3 takes 1024 with the bucket's prefix, file systems 255 a name."""
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def check_key(key: str) -> str:
    """`key` if it can be one on every backend, else ValueError: relative, no `..`, no empty part, no odd character."""
    parts = key.split("/")
    if any(part in ("", ".", "..") or not _LETTERS.issuperset(part) for part in parts):
        raise ValueError(f"not an exchange key: {key!r} (ASCII letters, digits, '.', '_', '-' in parts divided by '/')")
    if len(key) > MAX_KEY or max(map(len, parts)) > MAX_PART:
        raise ValueError(f"exchange key too long: {key!r} (at most {MAX_KEY} characters, {MAX_PART} a part)")
    return key


def check_prefix(prefix: str) -> str:
    """`prefix` if it can begin a key (also "", or a folder with its slash at the end), else ValueError."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def check_range(key: str, size_bytes: int, start: int, length: int | None) -> tuple[int, int]:
    """(start, length) of a read inside a value of `size_bytes`; ValueError when it reaches outside."""
    wanted = size_bytes - start if length is None else length
    if start < 0 or wanted < 0 or start + wanted > size_bytes:
        raise ValueError(f"{key}: start {start}, length {length} reach outside the value's {size_bytes} bytes")
    return start, wanted


def check_lifetime(key: str, lifetime_s: float | None) -> float | None:
    """`lifetime_s` if it is None or a positive finite number of seconds, else ValueError."""
    if lifetime_s is not None and not 0 < lifetime_s < float("inf"):
        raise ValueError(f"{key}: lifetime_s {lifetime_s!r} is not a positive number of seconds (None: no end)")
    return lifetime_s


def views(data: Data) -> list[memoryview]:
    """The buffers of one value as byte views, without a copy; empty ones left out."""
    buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
