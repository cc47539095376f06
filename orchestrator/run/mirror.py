"""A directory and its copy in an exchange: a log of what changes in it, which others follow.

    <name>/log/0/NNNNNNNN    the changes; put_if_absent of the next number decides between those who write
    <name>/log/1/NNNNNN      a hundred of them as one, log/2 a hundred of these, ...: a reader takes the longest first
    <name>/log/end/NNNNNNNN  all of them up to that one, as one: written where nothing more is to come for a while
    <name>/f/<id>/NNNNN      pieces of what is too long for a change, or read by few (`apart`)

A change is a line of JSON, and bytes: of each file that changed its size and from where on it has others; what lies
before stays. Read once more it does no harm: it says what is, not what was done. A file has one writer at a time.
Not mirrored: links, and what begins with a dot.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from functions.exchange.base import Buffer, Data, Exchange, ExchangeError, NotFound
from orchestrator.base.errors import Fenced, RunError
from orchestrator.base.files import nofollow, writing
from orchestrator.run.changes import Change, Entry, tree

FAN, LEVELS = 100, 4
KEPT = 2
"""Of each level so many more blocks keep their parts, for readers that are behind."""
INLINE_BYTES, CHANGE_BYTES, PIECE_BYTES, BLOCK_BYTES = 1 << 20, 16 << 20, 8 << 20, 1 << 16
"""Of a file in a change; of a change (the last file may exceed it); of a piece; of what is compared by its hash."""
FRESH_S = 30.0
"""Who has not looked for so long lists first: the next change may be a part of another. KEPT blocks last for longer."""
SETTLED_S = 0.1
"""A file that was written to more recently may change again without that its time does."""
READERS = 8
RUNNER = "runner-"


class Overtaken(RunError):
    """Another has written a file first: what was decided by its old content has to be decided again."""


@dataclass(frozen=True)
class Seen:
    """A file as the log has it."""

    stamp: tuple[int, int, int] = (0, 0, 0)
    """Inode, time, size of the file that was compared last; zeros: to be compared again."""
    hashes: tuple[int, ...] = ()
    """Of its blocks."""
    size: int = 0


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class Mirror:
    """Thread-safe. Every method raises ExchangeError, and RunError for files that cannot be read or written here and a
    log that is none. `paths`: what of the directory is pushed. `apart`: files that are written once and read by few:
    `pull` makes them empty, `fetch` fills them. `kept`: what no change from elsewhere may touch."""

    def __init__(
        self, store: Exchange, name: str, directory: Path, *, by: str = "", kept: frozenset[str] = frozenset(),
        apart: Callable[[str], bool] = lambda _path: False, paths: Callable[[Path], Iterable[str]] = tree,
    ) -> None:  # fmt: skip
        """`by`: who writes, no two alike; one that begins with RUNNER is fenced off by the next such."""
        self._store, self._name, self.directory = store, name, directory
        self._by, self._kept, self._apart, self._paths = by, kept, apart, paths
        self.number = 0
        """Of the change that comes next."""
        self.changed_at = 0.0
        """When the last change was made, Unix seconds."""
        self._seen: dict[str, Seen] = {}
        self._entries: dict[str, Entry] = {}
        """Of files apart."""
        self._missing: set[str] = set()
        """Those of them that are empty here."""
        self._since: list[dict[str, int]] = [{} for _ in range(1, LEVELS)]
        """For each level above 0, from where on files may have changed since its block began."""
        self._from = 0
        """Of what was before that change, this one does not know all that was changed."""
        self._begun = False
        self._looked_s = float("-inf")
        self._lock = threading.RLock()

    # -- reading

    def pull(self) -> set[str]:
        """Takes over what others have appended; the paths that it touched. Raises Fenced."""
        with self._lock:
            touched: set[str] = set()
            try:
                if time.monotonic() > self._looked_s + FRESH_S:
                    self._catch_up(touched)
                while True:
                    looked_s = time.monotonic()
                    try:
                        data = self._store.get(self._key(0, self.number))
                    except NotFound:
                        self._looked_s = looked_s
                        return touched
                    self._take(data, self.number + 1, touched)
            finally:
                for path in touched:
                    self._note(path)

    def fetch(self, prefix: str = "") -> None:
        """Fills the files apart whose paths begin so."""
        with self._lock:
            for path in sorted(path for path in self._missing if path.startswith(prefix)):
                entry = self._entries[path]
                self._replace(self.directory / path, self._pieces(entry))
                self._missing.discard(path)
                self._note(path)

    def _catch_up(self, touched: set[str]) -> None:
        held, plan, number = set(self._store.list(f"{self._name}/log/")), list[tuple[str, int]](), self.number
        end = max((key for key in held if key.startswith(f"{self._name}/log/end/")), default=None)
        if end is not None and number == 0:  # who has older files is not told by it which of them are gone
            number = self._from = int(end[-8:]) + 1
            plan.append((end, number))
        while True:
            keys = {level: self._key(level, number // FAN**level) for level in range(LEVELS)}
            level = max((level for level, key in keys.items() if key in held), default=None)
            if level is None:
                break
            number = (number // FAN**level + 1) * FAN**level
            plan.append((keys[level], number))
        with ThreadPoolExecutor(READERS) as pool:
            for some in (plan[at : at + READERS] for at in range(0, len(plan), READERS)):
                for (_, number), data in zip(some, pool.map(self._store.get, [key for key, _ in some]), strict=True):
                    self._take(data, number, touched)

    def _take(self, data: bytes, number: int, touched: set[str]) -> list[tuple[int, dict[str, int]]]:
        """One change, after which the next is `number`; what `_count` says."""
        try:
            change = Change.decode(data)
        except ValueError as error:
            raise RunError(f"{self._name}: before {number}: not a change ({error})") from error
        own = change.by == self._by != ""
        if self._begun and not own and change.by.startswith(RUNNER):
            raise Fenced(f"{self._name}: another orchestrator has taken this run over; this one's files stay here")
        for entry, new in change.files:
            if not own:  # what is our own is here, and may have grown since
                touched.add(entry.path)
                if entry.path not in self._kept:
                    self._write(entry, new)
        self.changed_at = change.made_at
        return self._count([entry for entry, _ in change.files], number)

    def _write(self, entry: Entry, data: memoryview) -> None:
        path = self.directory / entry.path
        self._entries.pop(entry.path, None)
        self._missing.discard(entry.path)
        with writing(path):
            held = path.stat().st_size if path.exists() else 0
            parts: Iterator[Buffer] = self._pieces(entry) if entry.at else iter([data])
            if entry.size is None:
                path.unlink(missing_ok=True)
            elif self._apart(entry.path):
                self._entries[entry.path] = entry
                self._missing.add(entry.path)
                self._replace(path, iter(()))
            elif held < entry.start:
                raise RunError(f"{self._name}: {entry.path} goes on at {entry.start}, and has {held} bytes")
            elif 0 < held == entry.start:
                with path.open("ab") as file:
                    file.writelines(parts)
            else:
                self._replace(path, parts, entry.start)

    def _replace(self, path: Path, parts: Iterator[Buffer], kept_bytes: int = 0) -> None:
        temporary = path.with_name(f".{path.name}.new")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                if kept_bytes:
                    with path.open("rb") as before:
                        while left := kept_bytes - file.tell():
                            file.write(before.read(min(left, PIECE_BYTES)))
                file.writelines(parts)
            os.replace(temporary, path)

    def _pieces(self, entry: Entry) -> Iterator[bytes]:
        left, number = (entry.size or 0) - entry.start, 0
        while left > 0:
            piece = self._store.get(f"{self._name}/f/{entry.at}/{number:05d}")
            left, number = left - len(piece), number + 1
            yield piece

    # -- writing

    def push(self, *, begins: bool = False, whole: bool = False) -> None:
        """Appends what has changed here. `begins`: even if nothing has, to fence off a runner before this one. `whole`:
        nothing more is to come for a while. Raises Fenced."""
        with self._lock:
            if begins or time.monotonic() > self._looked_s + FRESH_S:
                self.pull()
            while begins and not self._begun:
                self._begun = self._append([], [], {})
            while not self._push(whole):
                pass
            if whole and self.number:
                everything = dict.fromkeys([*self._seen, *self._entries], 0)
                self._put_together(f"{self._name}/log/end/{self.number - 1:08d}", everything)

    def write(self, files: Mapping[str, bytes | None]) -> None:
        """Appends these files, None for one to remove, as one change, and then has them here: nothing lies here that is
        not in the log. Raises Overtaken where another has written one of them since the last pull."""
        with self._lock:
            entries = [Entry(path, size=None if data is None else len(data)) for path, data in files.items()]
            data = b"".join(Change.encode(self._by, entries, [data or b"" for data in files.values()]))
            while True:
                stale = time.monotonic() > self._looked_s + FRESH_S
                number = self.number
                if not stale and self._put(number, data):
                    break
                if self.pull() & files.keys():
                    raise Overtaken(f"{', '.join(files)}: another has just written there")
            ended = self._take(data, number + 1, set())
            for path in files:
                self._note(path)
            self._join(ended)

    def _push(self, whole: bool) -> bool:
        """False: another was first, and what has changed here is to be looked for again."""
        entries, parts, seen = list[Entry](), list[bytes](), dict[str, Seen]()
        for entry, data, found in self._changes(whole):
            entries.append(entry)
            parts.append(data)
            seen[entry.path] = found
            if sum(map(len, parts)) >= CHANGE_BYTES:
                if not self._append(entries, parts, seen):
                    return False
                entries, parts, seen = [], [], {}
        return not entries or self._append(entries, parts, seen)

    def _append(self, entries: list[Entry], parts: list[bytes], seen: dict[str, Seen]) -> bool:
        if not self._put(self.number, Change.encode(self._by, entries, parts)):
            self.pull()
            return False
        for entry in entries:
            if entry.size is None:
                self._seen.pop(entry.path, None)
                self._entries.pop(entry.path, None)
                self._missing.discard(entry.path)
            else:
                self._seen[entry.path] = seen[entry.path]
                if self._apart(entry.path):
                    self._entries[entry.path] = entry
                    self._missing.discard(entry.path)
        self.changed_at = time.time()
        self._join(self._count(entries, self.number + 1))
        return True

    def _put(self, number: int, data: Data) -> bool:
        """Whether this is the change of that number now."""
        put_s = time.monotonic()
        if self._store.put_if_absent(self._key(0, number), data) is None:
            return False
        if time.monotonic() > self._looked_s + FRESH_S:  # that long on its way: is it still the next one?
            held = self._store.list(f"{self._name}/log/")
            if any(self._key(level, number // FAN**level) in held for level in range(1, LEVELS)):
                self._looked_s = float("-inf")
                return False
        self._looked_s = put_s
        return True

    def _changes(self, whole: bool) -> Iterator[tuple[Entry, bytes, Seen]]:
        paths = sorted(self._paths(self.directory))
        for path in paths:
            if (found := self._compared(path, whole)) is not None:
                yield found
        for path in sorted((self._seen.keys() | self._entries.keys()) - set(paths)):
            yield Entry(path), b"", Seen()

    def _compared(self, path: str, whole: bool) -> tuple[Entry, bytes, Seen] | None:
        """How a file differs from the log's; None: not at all, or it is gone just now."""
        seen, apart, full = self._seen.get(path), self._apart(path), self.directory / path
        with suppress(FileNotFoundError):
            if seen is not None and seen.stamp == _stamp(os.stat(full, follow_symlinks=False)):
                return None
        with self._opened(path) as file:
            if file is not None:
                stat = os.fstat(file.fileno())
                stamp = _stamp(stat)
                if path in self._missing and not stat.st_size:
                    return None
                if stat.st_mtime > time.time() - SETTLED_S:
                    if apart and not whole:
                        return None
                    stamp = (0, 0, 0)
                hashes, start = list[int](), 0
                for known in seen.hashes if seen is not None else ():
                    block = file.read(min(BLOCK_BYTES, seen.size - start) if seen is not None else 0)
                    if xxhash.xxh3_64_intdigest(block) != known:
                        break
                    hashes.append(known)
                    start += len(block)
                if seen is not None and start == stat.st_size == seen.size:
                    self._seen[path] = Seen(stamp, seen.hashes, seen.size)
                    return None
                start = 0 if apart else start
                more, at, data, end = self._range(file, start, stat.st_size, apart)
                kept = hashes[: start // BLOCK_BYTES]
                return Entry(path, start, end, at), data, Seen(stamp, (*kept, *more), end)
        return None

    def _range(self, file: IO[bytes], start: int, end: int, apart: bool) -> tuple[tuple[int, ...], str, bytes, int]:
        """The hashes from the block on that has `start`; where the pieces of what follows `start` lie, or its bytes;
        where it ends."""
        position = file.seek(start - start % BLOCK_BYTES)
        at = uuid.uuid4().hex if apart or end - start > INLINE_BYTES else ""
        hashes, inline, number = list[int](), b"", 0
        while chunk := file.read(min(PIECE_BYTES, end - position)):
            blocks = range(0, len(chunk), BLOCK_BYTES)
            hashes += [xxhash.xxh3_64_intdigest(memoryview(chunk)[i : i + BLOCK_BYTES]) for i in blocks]
            own = chunk[max(0, start - position) :]
            if at:
                self._store.put(f"{self._name}/f/{at}/{number:05d}", own)
            else:
                inline += own
            position, number = position + len(chunk), number + 1
        return tuple(hashes), at, inline, max(position, start)

    # -- putting together

    def _count(self, entries: Iterable[Entry], number: int) -> list[tuple[int, dict[str, int]]]:
        """The levels whose blocks have ended with this change, and from where on files may have changed in them."""
        for starts in self._since:
            for entry in entries:
                starts[entry.path] = min(entry.start, starts.get(entry.path, entry.start))
        self.number = number
        over = [level for level in range(1, LEVELS) if number % FAN**level == 0]
        ended = [(level, self._since[level - 1]) for level in over if number - FAN**level >= self._from]
        for level in over:
            self._since[level - 1] = {}
        return ended

    def _join(self, ended: list[tuple[int, dict[str, int]]]) -> None:
        """What has ended becomes one; who has won the last change does it. Nobody needs it to succeed: what is not put
        together stays as it is."""
        with suppress(ExchangeError):
            for level, starts in ended:
                self._put_together(self._key(level, self.number // FAN**level - 1), starts)
            held = set(self._store.list(f"{self._name}/log/")) if ended else set()
            for level in range(1, LEVELS):
                for index in range(self.number // FAN**level - KEPT):
                    parts = self._key(level - 1, index * FAN)[:-2]
                    if self._key(level, index) in held and any(key.startswith(parts) for key in held):
                        self._store.delete(parts)

    def _put_together(self, key: str, starts: Mapping[str, int]) -> None:
        entries, parts = list[Entry](), list[bytes]()
        for path, start in sorted(starts.items()):
            entry, data = self._entries.get(path, Entry(path)), b""
            if entry.size is None and (seen := self._seen.get(path)) is not None:
                with self._opened(path) as file:
                    if file is not None:
                        start = min(start, seen.size)
                        hashes, at, data, end = self._range(file, start, seen.size, apart=False)
                        entry = Entry(path, start, end, at)
                        if hashes != seen.hashes[start // BLOCK_BYTES :]:  # it is another already: all of it comes next
                            self._seen[path] = Seen()
            entries.append(entry)
            parts.append(data)
        self._store.put(key, Change.encode(self._by, entries, parts))

    def _note(self, path: str) -> None:
        """What lies here under the path is what the log has."""
        self._seen.pop(path, None)
        with self._opened(path) as file:
            if file is not None and path not in self._missing:
                blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
                self._seen[path] = Seen((0, 0, 0), tuple(map(xxhash.xxh3_64_intdigest, blocks)), file.tell())

    @contextmanager
    def _opened(self, path: str) -> Iterator[IO[bytes] | None]:
        """None: there is none any more."""
        with writing(self.directory / path), ExitStack() as stack:
            try:
                file = stack.enter_context(open(self.directory / path, "rb", opener=nofollow))
            except FileNotFoundError:
                file = None
            yield file

    def _key(self, level: int, index: int) -> str:
        return f"{self._name}/log/{level}/{index:0{8 - 2 * level}d}"
