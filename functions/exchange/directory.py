"""The exchange in a directory: the default, nothing to install; also over a file system that several machines mount.

    <root>/<key>      the value, then a footer of one line, so that a JSON value stays readable with any pager
    <root>/+tmp/      values being written; a rename or a hard link publishes them
    <root>/+lock      held shared for the moment of publishing, exclusive for the moment of removing

A value survives the death of any process at any moment. It is not flushed to the disk (no fsync): after a loss of
power the newest values may be missing or refused as Corrupt, never wrong.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from functions.base.wire import Ref
from functions.exchange.base import (
    Corrupt,
    Data,
    Exchange,
    Full,
    NotFound,
    Unavailable,
    Unsuitable,
    check_key,
    check_lifetime,
    check_prefix,
    check_range,
    checksum,
    views,
)

PIECE_BYTES = 1 << 20
"""Hashed, then written, in pieces that stay in the processor's cache."""
POLL_S = (0.0005, 0.01)
"""First and longest pause between two looks of `wait`."""
ABANDONED_S = 3600.0
"""An unpublished file that nobody wrote to for so long has lost its writer."""
OPENING = "cannot be used as an exchange"
WRONG = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EINVAL)
"""Of opening: no waiting mends these."""
_READ_BYTES = 1 << 30
"""Linux reads at most 2 GiB - 4 KiB in one call."""


@dataclass(frozen=True)
class Footer:
    """The last line of a value's file, always FOOTER_BYTES long; `check` makes an altered footer recognisable."""

    size_bytes: int
    checksum: str
    expires: float
    """Unix time; 0 when the value has no end."""

    def encode(self) -> bytes:
        text = f"\n# exchange size={self.size_bytes:015d} xxh3={self.checksum} expires={self.expires:014.3f}"
        return f"{text} check={xxhash.xxh32_hexdigest(text.encode())}\n".encode()

    @classmethod
    def decode(cls, line: bytes, file_bytes: int) -> Footer | None:
        """None when it is no footer, or one of a file of another size."""
        text, _, _ = line.partition(b" check=")
        try:
            fields = dict(field.split("=") for field in text.decode().split()[2:])
            footer = cls(int(fields["size"]), fields["xxh3"], float(fields["expires"]))
        except (ValueError, KeyError):
            return None
        return footer if footer.encode() == line and footer.size_bytes + FOOTER_BYTES == file_bytes else None

    @property
    def expired(self) -> bool:
        return 0 < self.expires <= time.time()


FOOTER_BYTES = len(Footer(0, "0" * 32, 0.0).encode())


class DirectoryExchange:
    """See `Exchange`. Raises Unsuitable when `root` can be no directory, Unavailable when it cannot be made or written,
    Full when its disk is full."""

    sweep_every_s = 300.0

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self._tmp = self.root / "+tmp"
        self._lock = str(self.root / "+lock")
        with self._away(OPENING):
            self._tmp.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666))
        self._next_sweep = 0.0

    @property
    def durable(self) -> Exchange:
        return self

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        path = self._path(key)
        ref, temporary = self._write(key, data, lifetime_s)
        with self._publishing(key, path, temporary):
            os.replace(temporary, path)
        return ref

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        path = self._path(key)
        if self._live(path):
            return None
        ref, temporary = self._write(key, data, lifetime_s)
        with self._publishing(key, path, temporary):
            won = _link(temporary, path)
        if not won and not self._live(path):  # expired, or deleted since: once more, with nobody else moving
            with self._publishing(key, path, temporary, exclusive=True):
                if not self._live(path):
                    path.unlink(missing_ok=True)
                    won = _link(temporary, path)
        with self._away(key):
            os.unlink(temporary)
        return ref if won else None

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        name = key.key if isinstance(key, Ref) else key
        with self._opened(name) as descriptor:
            footer = self._footer(name, descriptor)
            if footer is None:
                raise NotFound(f"{name}: no such value in {self.root}", name)
            if isinstance(key, Ref) and (key.size_bytes, key.checksum) != (footer.size_bytes, footer.checksum):
                raise Corrupt(f"{name}: the value in {self.root} is not the one that was referred to ({key})")
            begin, wanted = check_range(name, footer.size_bytes, start, length)
            data = _read(descriptor, begin, wanted)
        if len(data) != wanted or (wanted == footer.size_bytes and checksum(data) != footer.checksum):
            raise Corrupt(f"{name}: the bytes in {self.root} are not those that were written (checksum differs)")
        return data

    def list(self, prefix: str) -> list[str]:
        with self._away(prefix or "listing"):
            return sorted(key for key, path in self._files(check_prefix(prefix)) if self._live(path))

    def wait(self, key: str, timeout_s: float) -> bool:
        path, end, pause = self._path(key), time.monotonic() + timeout_s, POLL_S[0]
        while not self._live(path):
            left = end - time.monotonic()
            if left <= 0:
                self._check_root()
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, POLL_S[1])
        return True

    def delete(self, prefix: str) -> int:
        deleted = 0
        with self._away(prefix or "deleting"):
            self._check_root()
            for _, path in list(self._files(check_prefix(prefix))):
                live = self._live(path)
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    deleted += live
            self._prune(check_prefix(prefix))
        return deleted

    def sweep(self) -> int:
        """Removes values past their lifetime and what killed writers left; how many. Called by `put` now and then."""
        swept = 0
        with self._away("sweeping"):
            for temporary in self._tmp.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if temporary.stat().st_mtime < time.time() - ABANDONED_S:
                        temporary.unlink()
                        swept += 1
            for _, path in list(self._files("")):
                if self._expired(path):
                    with self._locked(fcntl.LOCK_EX):
                        if self._expired(path):
                            path.unlink(missing_ok=True)
                            swept += 1
        return swept

    # -- writing

    def _write(self, key: str, data: Data, lifetime_s: float | None) -> tuple[Ref, str]:
        """Writes value and footer to a new file of `+tmp`; leaves nothing behind when that fails."""
        expires = 0.0 if check_lifetime(key, lifetime_s) is None else time.time() + float(lifetime_s or 0)
        if time.monotonic() > self._next_sweep:
            self._next_sweep = time.monotonic() + self.sweep_every_s
            self.sweep()
        temporary = str(self._tmp / uuid.uuid4().hex)
        with self._away(key):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with self._away(key):
                try:
                    digest, size = xxhash.xxh3_128(), 0
                    for view in views(data):
                        for at in range(0, view.nbytes, PIECE_BYTES):
                            piece = view[at : at + PIECE_BYTES]
                            digest.update(piece)
                            _write_all(descriptor, piece)
                        size += view.nbytes
                    _write_all(descriptor, memoryview(Footer(size, digest.hexdigest(), expires).encode()))
                finally:
                    os.close(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return Ref(key, size, digest.hexdigest()), temporary

    @contextlib.contextmanager
    def _publishing(self, key: str, path: Path, temporary: str, *, exclusive: bool = False) -> Iterator[None]:
        """Holds the lock with the folder of `path` in place; removes `temporary` when the body fails."""
        try:
            with self._away(key), self._locked(fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH):
                if path.parent != self.root:
                    path.parent.mkdir(parents=True, exist_ok=True)
                yield
        except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
            os.unlink(temporary)
            raise ValueError(f"{key}: one of its folders holds a value, or it is itself a folder of others") from error
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    @contextlib.contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        descriptor = os.open(self._lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, mode)
            yield
        finally:
            os.close(descriptor)

    def _prune(self, prefix: str) -> None:
        """Removes the folders that begin with `prefix` and have become empty."""
        start = self.root / prefix.rpartition("/")[0]
        for folder, _, _ in os.walk(start, topdown=False):
            name = folder[len(str(self.root)) + 1 :] + "/"
            if name.startswith(prefix) and len(name) > 1 and not name.startswith("+"):
                with self._locked(fcntl.LOCK_EX), contextlib.suppress(OSError):
                    os.rmdir(folder)

    # -- reading

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _files(self, prefix: str) -> Iterator[tuple[str, Path]]:
        """(key, path) of the files whose key begins with `prefix`, expired ones too."""
        self._check_root()
        for folder, folders, names in os.walk(self.root / prefix.rpartition("/")[0]):
            relative = folder[len(str(self.root)) + 1 :]
            folders[:] = [f for f in folders if not f.startswith("+") and _on_the_way(f"{relative}/{f}/", prefix)]
            for name in names:
                key = f"{relative}/{name}" if relative else name
                if key.startswith(prefix) and not name.startswith("+"):
                    yield key, Path(folder, name)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._check_root()
            raise NotFound(f"{key}: no such value in {self.root}", key) from error
        except OSError as error:
            raise Unavailable(f"{key}: {self.root}: {error.strerror}", str(self.root)) from error
        try:
            with self._away(key):
                yield descriptor
        finally:
            os.close(descriptor)

    def _footer(self, key: str, descriptor: int) -> Footer | None:
        """None for a folder or an expired value; raises Corrupt."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        footer = None
        if status.st_size >= FOOTER_BYTES:
            line = os.pread(descriptor, FOOTER_BYTES, status.st_size - FOOTER_BYTES)
            footer = Footer.decode(line, status.st_size)
        if footer is None:
            raise Corrupt(f"{key}: the file in {self.root} was truncated or altered ({status.st_size} bytes)")
        return None if footer.expired else footer

    def _live(self, path: Path) -> bool:
        """Whether there is a value (an altered one counts: it is `get` that refuses it)."""
        key = str(path)[len(str(self.root)) + 1 :]
        try:
            with self._opened(key) as descriptor:
                return self._footer(key, descriptor) is not None
        except NotFound:
            return False
        except Corrupt:
            return True

    def _expired(self, path: Path) -> bool:
        return path.is_file() and not self._live(path)

    # -- errors

    def _check_root(self) -> None:
        if not self._tmp.is_dir():
            raise Unavailable(f"{self.root}: the exchange's directory is gone (unmounted or removed?)", str(self.root))

    @contextlib.contextmanager
    def _away(self, what: str) -> Iterator[None]:
        """The one boundary where the file system's failures become `Unavailable`."""
        try:
            yield
        except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
            if what == OPENING:
                raise Unsuitable(f"{self.root}: {what}: a file is in the way ({error.filename})") from error
            raise
        except OSError as error:
            if what == OPENING and error.errno in WRONG:
                raise Unsuitable(f"{self.root}: {what}: {error.strerror}") from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Full(what, str(self.root), error.strerror or "no room") from error
            raise Unavailable(f"{what}: {self.root}: {error.strerror}", str(self.root)) from error


def _on_the_way(folder: str, prefix: str) -> bool:
    folder = folder.lstrip("/")
    return folder.startswith(prefix) or prefix.startswith(folder)


def _link(temporary: str, path: Path) -> bool:
    """Publishes under `path` unless something is there. (Over NFS a link may succeed and answer that it failed.)"""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return os.stat(temporary).st_nlink == 2
    return True


def _write_all(descriptor: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, start: int, length: int) -> bytes:
    if length <= _READ_BYTES:
        return os.pread(descriptor, length, start)
    pieces = [
        os.pread(descriptor, min(_READ_BYTES, start + length - at), at)
        for at in range(start, start + length, _READ_BYTES)
    ]
    return b"".join(pieces)
