"""Which processes there are, by /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Processes that `pid` has started, and those that they have, zombies included; parents first."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += sorted(child for child, of in parents.items() if of == parent)
    return found[1:]


def who_logs_to(log: Path) -> list[int]:
    """Processes whose standard error goes to this file."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/2"):
        with suppress(OSError):
            if link.readlink() == log.resolve():
                found.append(int(link.parts[2]))
    return found


def exists(pid: int) -> bool:
    """A process that has ended and waits to be reaped by whoever adopted it does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def private_mb(pid: int | str = "self") -> float:
    """Memory that is the process's own: anonymous pages, no file's (proc(5), smaps)."""
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def mapping(address: int) -> str:
    """The file that lies there in this process's memory; nothing where it is private."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, permissions, _, _, _, *file = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in where.split("-"))
        if low <= address < high:
            return file[0] if file and permissions.endswith("s") else ""
    raise LookupError(hex(address))
