"""A change of a directory's files, as a log of them has it (mirror.py): a line of JSON, and bytes."""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Entry:
    """Of one file in a change."""

    path: str
    start: int = 0
    size: int | None = None
    """None: it is gone."""
    at: str = ""
    """Where its pieces lie; "": its bytes are in the change."""

    @classmethod
    def of(cls, path: Any, start: Any, size: Any, at: Any) -> Self:
        """As it came: a job's own code may have written it. Raises ValueError."""
        parts = str(path).encode().decode().split("/")  # no half of a character
        if any(part in ("", ".", "..") or "\0" in part for part in parts) or not re.fullmatch("[0-9a-f]*", at):
            raise ValueError(f"{path!r} at {at!r}")
        if not 0 <= int(start) <= (int(start) if size is None else int(size)):
            raise ValueError(f"{path!r} from {start!r} to {size!r}")
        return cls("/".join(parts), int(start), None if size is None else int(size), str(at))


@dataclass(frozen=True)
class Change:
    by: str
    """Who has made it."""
    made_at: float
    """Unix seconds."""
    files: list[tuple[Entry, memoryview]]
    """With what is new of each, from `start` on; nothing where that lies elsewhere."""

    @staticmethod
    def encode(by: str, entries: Iterable[Entry], parts: Iterable[bytes]) -> list[bytes]:
        told = {"by": by, "time": time.time(), "files": [astuple(entry) for entry in entries]}
        return [json.dumps(told).encode() + b"\n", *parts]

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises ValueError."""
        at = data.find(b"\n") + 1
        try:
            told = json.loads(data[:at])
            change = cls(str(told["by"]), float(told["time"]), [])
            for entry in (Entry.of(*entry) for entry in told["files"]):
                end = at if entry.size is None or entry.at else at + entry.size - entry.start
                change.files.append((entry, memoryview(data)[at:end]))
                at = end
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(repr(error)) from error
        return change


def tree(directory: Path, below: str = "") -> Iterator[str]:
    """The files that are mirrored where nothing else is said."""
    with suppress(FileNotFoundError), os.scandir(directory / below) as found:
        for entry in found:
            if not entry.name.startswith("."):
                if entry.is_dir(follow_symlinks=False):
                    yield from tree(directory, f"{below}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield f"{below}{entry.name}"
