"""A small file that others read while a run rewrites it: they see the old or the new one, never half of it."""

import os
from pathlib import Path

from orchestrator.base.errors import RunError


def rewrite(path: Path, data: bytes) -> None:
    """Raises RunError where it cannot be written. No fsync: after a crash of the machine it is written anew."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error
