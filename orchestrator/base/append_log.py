"""Files of lines that grow while others read them: a reader sees whole lines, and at most one half line at the end."""

import os
from pathlib import Path

from orchestrator.base.errors import RunError


class Lines:
    """Appends to `path`, each line in one write, after its first `kept` bytes (an execution that was killed may have
    left half a line behind them). Raises RunError where the file cannot be written."""

    def __init__(self, path: Path, kept: int) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, kept)
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror}") from error

    def append(self, line: bytes) -> None:
        """Raises RunError where it cannot be written; nothing of it is in the file then, and it may be tried again."""
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written: {error.strerror}") from error
        if written < len(line):
            os.ftruncate(self._file, end)
            raise RunError(f"{self._path}: cannot be written: the disk is full")

    def close(self) -> None:
        os.close(self._file)
