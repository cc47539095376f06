"""An exchange in memory, for one event loop: no threads, no waiting. Functions watch keys of it for cuts."""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from functions.base.samples import SampleBatch
from functions.base.wire import Ref
from functions.exchange.base import Corrupt, Data, Exchange, NotFound, check_key, checksum


class MemoryExchange:
    """See Exchange. `clock` gives the seconds by which lifetimes are measured."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[str, tuple[bytes, float | None]] = {}
        self._keys: list[str] = []
        self._watched: dict[str, asyncio.Event] = {}
        self._batches: dict[str, SampleBatch] = {}

    @property
    def durable(self) -> Exchange:
        return self

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        content = bytes(data) if isinstance(data, bytes | bytearray | memoryview) else b"".join(data)
        if check_key(key) not in self._values:
            insort(self._keys, key)
        self._batches.pop(key, None)
        self._values[key] = content, None if lifetime_s is None else self._clock() + lifetime_s
        if key in self._watched:
            self._watched[key].set()
        return Ref(key, len(content), checksum(content))

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        return None if self._alive(key) else self.put(key, data, lifetime_s=lifetime_s)

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        name = key.key if isinstance(key, Ref) else key
        if not self._alive(name):
            raise NotFound(f"{name}: no value under this key")
        content = self._values[name][0]
        whole = start == 0 and length is None
        if isinstance(key, Ref) and (
            key.size_bytes != len(content) or (whole and key.checksum and key.checksum != checksum(content))
        ):
            raise Corrupt(f"{name}: not the value that was written")
        stop = len(content) if length is None else start + length
        if not 0 <= start <= stop <= len(content):
            raise ValueError(f"{name}: bytes {start} to {stop} of {len(content)}")
        return content[start:stop]

    def list(self, prefix: str) -> list[str]:
        first = bisect_left(self._keys, prefix)
        found = []
        for key in self._keys[first:]:
            if not key.startswith(prefix):
                break
            found.append(key)
        return [key for key in found if self._alive(key)]

    def wait(self, key: str, timeout_s: float) -> bool:
        """Nothing can be put while a synchronous call waits: looks once, whatever the timeout."""
        return self._alive(key)

    def delete(self, prefix: str) -> int:
        keys = self.list(prefix)
        for key in keys:
            self._forget(key)
        return len(keys)

    def samples(self, refs: Iterable[Ref]) -> SampleBatch:
        """The batches under `refs`, as one; each is decoded once, however many functions read it."""
        found = []
        for ref in refs:
            if ref.key not in self._batches or not self._alive(ref.key):
                self._batches[ref.key] = SampleBatch.decode(self.get(ref))
            found.append(self._batches[ref.key])
        return found[0] if len(found) == 1 else SampleBatch.concat(found)

    def watch(self, key: str) -> asyncio.Event:
        """Set as soon as there is a value under `key`."""
        event = self._watched.setdefault(key, asyncio.Event())
        if self._alive(key):
            event.set()
        return event

    def unwatch(self, key: str) -> None:
        self._watched.pop(key, None)

    def _alive(self, key: str) -> bool:
        found = self._values.get(key)
        if found is None:
            return False
        if found[1] is not None and found[1] <= self._clock():
            self._forget(key)
            return False
        return True

    def _forget(self, key: str) -> None:
        del self._values[key]
        self._batches.pop(key, None)
        del self._keys[bisect_left(self._keys, key)]
