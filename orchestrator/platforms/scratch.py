"""The local platform's directory: sockets, and what replicas put aside (a model's copy, at most).

Its owner holds a lock on it for as long as it lives. One whose owner was killed has none: the next platform that starts
on the machine removes it.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "rlhf-"
"""Short: a Unix socket's path has 107 bytes."""
MARK = ".scratch"
"""In each of them: what has it not is somebody else's, whatever its name."""


class Scratch:
    """Locked before it gets its name, so that nobody finds it without."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        sweep(parent)
        made = Path(tempfile.mkdtemp(prefix=".", dir=parent))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (made / MARK).touch()
        self.path = made.rename(parent / f"{PREFIX}{made.name.lstrip('.')}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Removes the directories of owners that are gone; those of other users, and what is no such directory, stay."""
    for path in parent.glob(f"{PREFIX}????????"):
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid() and (path / MARK).is_file():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
