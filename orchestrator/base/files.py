"""Files that others read while they are written: they see the old or the new one, or whole lines of one that grows."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from orchestrator.base.errors import RunError


def nofollow(path: str, flags: int) -> int:
    """`opener` for files of a run: a recipe may write there, and a link could lead where it may not look."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the block fails with of the file system is a RunError that names `path`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def write_atomically(path: Path, data: bytes, *, flush: bool = True) -> None:
    """Readers see the old content or the new, never half. One writer at a time. Raises RunError.

    `flush` False: a crash of the machine may take it, as it is written anew then.
    """
    temporary = path.with_name(f".{path.name}.new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb", opener=nofollow) as file:
                file.write(data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class Lock:
    """One holder at a time of `path`, of all threads and processes (flock, which NFS has too); reentrant in a thread.
    Entering waits, and raises RunError where the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.RLock()
        self._held = 0
        self._file: IO[bytes]

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            if not self._held:
                with writing(self._path):
                    self._file = self._path.open("ab")
                    fcntl.flock(self._file, fcntl.LOCK_EX)
            self._held += 1
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._held -= 1
        if not self._held:
            self._file.close()
        self._threads.release()


class Lines:
    """Appends to `path`, each line in one write, after its first `kept` bytes (an execution that was killed may have
    left half a line behind them). Raises RunError where the file cannot be written."""

    def __init__(self, path: Path, kept: int) -> None:
        self._path = path
        with writing(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            os.ftruncate(self._file, kept)

    def append(self, line: bytes) -> None:
        """Raises RunError where it cannot be written; nothing of it is in the file then, and it may be tried again."""
        end = os.fstat(self._file).st_size
        with writing(self._path):
            written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, end)
            raise RunError(f"{self._path}: cannot be written: the disk is full")

    def close(self) -> None:
        os.close(self._file)
