"""JSON lines of a file that grows: of those that were asked for last, only what was appended is parsed again."""

import json
import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.base.errors import RunError
from orchestrator.base.files import nofollow

KEPT = 16
"""Files whose lines stay parsed."""


@dataclass
class _File:
    inode: int = 0
    offset: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


class Tails:
    """Thread-safe."""

    def __init__(self) -> None:
        self._file = lru_cache(KEPT)(lambda _path: _File())
        self._lock = threading.Lock()

    def read(self, path: Path) -> list[dict[str, Any]]:
        """The whole lines, in order; none where there is no file. Raises RunError for a file of something else."""
        with self._lock:
            file = self._file(path)
            try:
                stat = os.stat(path)
                if stat.st_ino != file.inode or stat.st_size < file.offset:
                    file.inode, file.offset, file.rows = stat.st_ino, 0, []
                if stat.st_size > file.offset:
                    with open(path, "rb", opener=nofollow) as opened:
                        opened.seek(file.offset)
                        data = opened.read()
                    whole = data[: data.rfind(b"\n") + 1]
                    file.rows = file.rows + [json.loads(line) for line in whole.splitlines()]
                    file.offset += len(whole)
            except FileNotFoundError:
                file.inode, file.offset, file.rows = 0, 0, []
            except (OSError, ValueError) as error:
                raise RunError(f"{path}: cannot be read: {error}") from error
            return file.rows
