"""Limits on the fork server under test and all that it starts, by means other than its own: should it fail, this
machine is not what it takes. Processes and the size of files by resource limits, of root's programs too (they run as
nobody); memory by a cgroup below our own, where we may make one (version 1, root)."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROCESSES, FILE_BYTES, MEMORY_BYTES = 256, 256 << 20, 3 << 30


@contextmanager
def contained(pid: int) -> Iterator[None]:
    for which, value in ((resource.RLIMIT_NPROC, PROCESSES), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        if os.geteuid() == 0 or which != resource.RLIMIT_NPROC:  # an ordinary user's count has all that it runs
            resource.prlimit(pid, which, (value, value))
    group = _group()
    try:
        if group is not None:
            (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        if group is not None:
            with suppress(OSError):  # some of it is still ending: an empty cgroup is left
                group.rmdir()


def _group() -> Path | None:
    lines = (line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = next((path for _, kinds, path in lines if kinds == "memory"), None)
    if own is None:
        return None
    group = Path(f"/sys/fs/cgroup/memory{own}/rlhf-sandbox-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        return None
    return group
