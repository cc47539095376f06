"""Past events by kind, a page at a time; and the last lines of a text file."""

import errno
from collections.abc import Collection, Sequence
from pathlib import Path

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.base.files import nofollow

CHUNK = 1 << 18
"""As much of a file's end as is looked at."""


def event_page(events: Sequence[Json], kinds: Collection[str] | None, before: int | None, limit: int) -> Json:
    """The EventPage of models.py. Without `kinds`, all but `stage`, which tells of every replica."""
    found = [e for e in events if (e["type"] in kinds if kinds else e["type"] != "stage")]
    older = found if before is None else [e for e in found if e["id"] < before]
    page = older[-limit:][::-1]
    return {"events": page, "total": len(found), "next": page[-1]["id"] if len(older) > limit else None}


def last_lines(path: Path, count: int) -> list[str]:
    """None where there is no file, or a link. Raises RunError where it cannot be read."""
    try:
        with open(path, "rb", opener=nofollow) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - CHUNK))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return []
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
