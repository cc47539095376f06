"""A node's own copies of what lies in a durable store: written or read here once, the next reader finds it on its disk.

    put   content-named --> store, then a file         get   file, checked --else--> store, then a file
    hold  content-named --> a file alone
    any other key       --> store                      a miss, a file that is altered, a full disk: as without this tier

Content-named are keys that end in the checksum of their value (`shard-00000.<xxh3-128>`, functions/weights/blobs.py):
they never change, so a copy cannot be stale, and one whose bytes are others is seen. Parts of a value that were read
are kept as such (`<checksum>.<start>.<length>`); a copy of the whole serves any part of it. The first read of a copy in
a process checks all of it. Copies that were used longest ago go when there are more than `limit_bytes` of them.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from functions.base.wire import Ref
from functions.exchange.base import Corrupt, Data, Exchange, ExchangeError, NotFound, checksum, views
from functions.exchange.directory import FOOTER_BYTES, DirectoryExchange

ADDRESSED = re.compile(r".*\.([0-9a-f]{32})")
DIRECTORY, LIMIT_GB = "RLHF_NODE_TIER", "RLHF_NODE_TIER_GB"
"""In the environment of processes that have such a directory: the agent's (functions/server/agent.py)."""

log = logging.getLogger(__name__)


def with_node(store: Exchange, job: str) -> Exchange:
    """`store` with the tier that this process's node has for `job`; without one, `store`."""
    directory, limit_gb = os.environ.get(DIRECTORY, ""), float(os.environ.get(LIMIT_GB, "0"))
    return NodeExchange(store, Path(directory) / job, int(limit_gb * 1e9)) if directory and limit_gb else store


def node_of(exchange: Exchange) -> NodeExchange | None:
    """The tier over the store where what has to last lies, if there is one."""
    store = exchange.durable
    return store if isinstance(store, NodeExchange) else None


class NodeExchange:
    """See `Exchange`: all guarantees are the store's. The tier itself never fails a call."""

    def __init__(self, store: Exchange, directory: Path, limit_bytes: int) -> None:
        self.store, self.directory, self.limit_bytes = store, directory, limit_bytes
        self._lock = threading.Lock()
        self._checked: set[str] = set()
        """Values whose copies this process has compared with their names."""
        self._said: set[str] = set()
        self._files: DirectoryExchange | None = None
        with self._tried("opened"):
            self._files = DirectoryExchange(directory)

    @property
    def durable(self) -> Exchange:
        return self

    @property
    def identity(self) -> str:
        """The same in all processes, pods among them, that have this directory."""
        found = self.directory.stat()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{found.st_dev}.{found.st_ino}"

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        ref = self.store.put(key, data, lifetime_s=lifetime_s)
        if ref.checksum == _content(key):
            self._keep(ref.checksum, data, ref.size_bytes)
        return ref

    def hold(self, key: str, data: Data) -> bool:
        """A copy alone, of what may be lost with this node: the store gets nothing. Whether it could be kept."""
        content = _content(key)
        return content is not None and self._keep(content, data, sum(view.nbytes for view in views(data)))

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        return self.store.put_if_absent(key, data, lifetime_s=lifetime_s)

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        path = key.key if isinstance(key, Ref) else key
        content = _content(path)
        if content is None:
            return self.store.get(key, start=start, length=length)
        part = content if start == 0 and length is None else f"{content}.{start}.{length}"
        found = self._whole(part)
        if found is None and part != content:
            found = self._part(content, start, length)
        if found is None:
            found = self.store.get(key, start=start, length=length)
            self._keep(part, found, len(found))
        return found

    def list(self, prefix: str) -> list[str]:
        return self.store.list(prefix)

    def wait(self, key: str, timeout_s: float) -> bool:
        return self.store.wait(key, timeout_s)

    def delete(self, prefix: str) -> int:
        """Copies stay until they are the ones used longest ago: nobody asks for what no manifest names."""
        return self.store.delete(prefix)

    # --- copies ----------------------------------------------------------------------------------------------------

    def _whole(self, name: str) -> bytes | None:
        """A copy of a value or of a part of it, all of the copy; None: there is none to be had."""
        if self._files is None or ("." not in name and not self._is_whole(name)):
            return None
        with self._tried("read", name):
            try:
                data = self._files.get(name)
            except NotFound:
                return None
            except Corrupt as error:
                self._remove(name, str(error))
                return None
            self._use(name)
            return data
        return None

    def _part(self, content: str, start: int, length: int | None) -> bytes | None:
        """Of a copy of the whole value."""
        if self._files is None or not self._is_whole(content):
            return None
        with self._tried("read", content), contextlib.suppress(NotFound):
            data = self._files.get(content, start=start, length=length)
            self._use(content)
            return data
        return None

    def _is_whole(self, content: str) -> bool:
        """Whether there is a copy, and it is what its name says: looked at once in a process, by one thread."""
        with self._lock, self._tried("read", content):
            if content in self._checked:
                return True
            try:
                with open(self.directory / content, "rb") as file:
                    view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except FileNotFoundError:
                return False
            if checksum(view[: max(0, len(view) - FOOTER_BYTES)]) != content:
                self._remove(content, f"{content}: the copy's bytes are not those that its name says")
                return False
            self._checked.add(content)
            return True
        return False

    def _remove(self, name: str, why: str) -> None:
        log.warning("node tier: %s; it is removed, and read from the store", why)
        (self.directory / name).unlink(missing_ok=True)

    def _keep(self, name: str, data: Data, size_bytes: int) -> bool:
        if self._files is not None and size_bytes <= self.limit_bytes:
            with self._tried("written", name):
                self._make_room(size_bytes)
                self._files.put(name, data)
                return True
        return False

    def _make_room(self, size_bytes: int) -> None:
        """For so many bytes more. Two writers at a time may go beyond the limit by what both write."""
        copies = [(entry.stat(), entry.path) for entry in os.scandir(self.directory) if not entry.name.startswith("+")]
        excess = sum(stat.st_size for stat, _ in copies) + size_bytes - self.limit_bytes
        for stat, path in sorted(copies, key=lambda copy: copy[0].st_mtime):
            if excess <= 0:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                excess -= stat.st_size

    def _use(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.directory / name)

    @contextlib.contextmanager
    def _tried(self, what: str, name: str = "") -> Iterator[None]:
        """What goes wrong with the tier is said once in its kind, and is no failure of the exchange."""
        try:
            yield
        except (ExchangeError, OSError, ValueError) as error:
            if what not in self._said:
                self._said.add(what)
                log.warning("node tier: %s could not be %s: %s", name or self.directory, what, error)


def _content(key: str) -> str | None:
    """The checksum of the value, where the key names it."""
    found = ADDRESSED.fullmatch(key.rpartition("/")[2])
    return None if found is None else found[1]
