"""The exchange in Redis (6.2 or newer): for small values, waited-for keys and everything that may be lost and rebuilt.

    <root><key>       a header of one line (Header); a value of at most INLINE_BYTES follows it
    <root><key>#      the bytes of a longer value, alone, so that neither side copies them to cut the header off
    channel <root><key>   a message when the key is written: `wait` sleeps until then

Both keys of a value are written in one MULTI and read in one MGET: no reader sees half of it. A conditional put is
a script, or WATCH and MULTI for long values; each writer signs its header, so that one whose answer was lost on the way
recognises on repeating that it had won.
Not for Redis Cluster: the two keys of a value lie in different slots.
"""

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from functions.base.wire import Ref
from functions.exchange.base import (
    Corrupt,
    Data,
    Exchange,
    ExchangeError,
    Full,
    NotFound,
    Unavailable,
    Unsuitable,
    check_key,
    check_lifetime,
    check_prefix,
    check_range,
    checksum,
    views,
)
from functions.exchange.redis_record import HEADER_BYTES, Expiry, Header, LargeValue
from functions.exchange.resp import PACKER, Command, Replies, converse

ROOT = "rlhf/"
"""Begins all keys of all jobs."""
MADE = "rlhf:"
"""Begins the names of users that are made for jobs, and made again where Redis has lost them (scoped.py)."""
INLINE_BYTES = 1 << 16
MAX_BYTES = 512 << 20
"""`proto-max-bulk-len`: the server closes the connection on a longer value."""
RETRY_PAUSES_S = (0.05, 0.3)
LOOK_AGAIN_S = 1.0
"""`wait` looks so often even without a message: one may be lost with a connection."""
_WRITE = """
local there = redis.call('EXISTS', KEYS[1]) == 1
local before = there and redis.call('GETRANGE', KEYS[1], 0, ARGV[4])
if there and ARGV[3] == 'NX' then return before end
if ARGV[2] == '' then redis.call('SET', KEYS[1], ARGV[1]) else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
if there then redis.call('UNLINK', KEYS[2]) end
redis.call('PUBLISH', KEYS[1], '')
return before
"""
"""A small put in one command: KEYS record and its `#`; ARGV record, lifetime in ms or "", "NX" or "", header's end."""
_WRITE_SHA = hashlib.sha1(_WRITE.encode()).hexdigest()
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

T = TypeVar("T")
Buffers = list[memoryview | bytes]
Views = list[memoryview]
Names = list[bytes]


class RedisExchange:
    """See `Exchange`. `root` begins every key, e.g. `rlhf/job/`. Raises Unsuitable for a wrong password."""

    lock_s = 60.0
    """A holder that dies keeps a lock for so long."""

    def __init__(self, url: str, root: str) -> None:
        if urlsplit(url).password:
            raise ValueError("a Redis URL holds no password here: give it in the environment as REDIS_PASSWORD")
        self.root = root
        self.name = urlsplit(url)._replace(query="").geturl()
        self.user = os.environ.get("REDIS_USERNAME") or None
        self.client = redis.Redis.from_url(
            url,
            username=self.user,
            password=os.environ.get("REDIS_PASSWORD") or None,
            socket_connect_timeout=5.0,
            socket_timeout=30.0,
            health_check_interval=0,
            command_packer=PACKER,
        )
        self._send("opening", lambda: [("PING",)])

    @property
    def durable(self) -> Exchange:
        return self

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        return self.store(key, data, lifetime_s)[0]

    def store(self, key: str, data: Data, lifetime_s: float | None = None, *, place: str = "i") -> tuple[Ref, str]:
        """`put`, and the place of the value that was there before ("": none; "s": not to be told)."""
        name, buffers, size, expiry = self._prepare(key, data, lifetime_s)
        if size <= INLINE_BYTES:
            header = Header(size, checksum(*buffers), uuid.uuid4().hex[:8], place)
            before = self._run_write(key, name, [header.encode(), *buffers], expiry, "")
            return Ref(key, size, header.checksum), _place(before)
        parts = LargeValue(name, buffers, size, expiry)
        before, *_ = self._send(key, lambda: [("GETRANGE", name, 0, HEADER_BYTES - 1), *parts.transaction()])
        return Ref(key, size, parts.checksum), _place(before or None)

    def announce(self, ref: Ref, lifetime_s: float | None) -> None:
        """Records that the value of `ref` lies in S3, which wakes those who wait for it."""
        name, _, _, expiry = self._prepare(ref.key, b"", lifetime_s)
        header = Header(ref.size_bytes, ref.checksum, uuid.uuid4().hex[:8], "s")
        self._run_write(ref.key, name, [header.encode()], expiry, "")

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        name, buffers, size, expiry = self._prepare(key, data, lifetime_s)
        if size > INLINE_BYTES:
            return self._put_large_if_absent(key, LargeValue(name, buffers, size, expiry))
        header = Header(size, checksum(*buffers), uuid.uuid4().hex[:8], "i")
        there = self._run_write(key, name, [header.encode(), *buffers], expiry, "NX")
        return Ref(key, size, header.checksum) if there in (None, header.encode()) else None

    def _put_large_if_absent(self, key: str, value: LargeValue) -> Ref | None:
        def attempt(connection: Any) -> Ref | None:
            while True:
                look = [("WATCH", value.name), ("EXISTS", value.name), ("GETRANGE", value.name, 0, HEADER_BYTES - 1)]
                _, exists, there = converse(connection, look)
                if exists:
                    converse(connection, [("UNWATCH",)])
                    mine = f" by={value.writer} ".encode() in there
                    return Ref(key, value.size_bytes, value.checksum) if mine else None
                if converse(connection, value.transaction())[-1] is not None:  # None: somebody wrote since the WATCH
                    return Ref(key, value.size_bytes, value.checksum)

        return self._with_connection(key, attempt)

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        path = key.key if isinstance(key, Ref) else key
        name = self._name(path)
        if start == 0 and length is None:
            ((record, apart),) = self._send(path, lambda: [("MGET", name, name + "#")])
            header = self._header(path, record, key)
            data = record[HEADER_BYTES:] if header.place != "a" else apart
            self._check_there(path, data)
            if len(data) != header.size_bytes or checksum(data) != header.checksum:
                raise Corrupt(f"{path}: its bytes in Redis are not those that were written (checksum differs)")
            return bytes(data)
        first = max(start, 0)
        last = -1 if length is None else max(first + length - 1, first)
        inline_last = last if last < 0 else last + HEADER_BYTES
        *_, (exists, record, inline_size, apart_size, inline, apart) = self._send(
            path,
            lambda: [
                ("MULTI",),
                ("EXISTS", name, name + "#"),
                ("GETRANGE", name, 0, HEADER_BYTES - 1),
                ("STRLEN", name),
                ("STRLEN", name + "#"),
                ("GETRANGE", name, first + HEADER_BYTES, inline_last),
                ("GETRANGE", name + "#", first, last),
                ("EXEC",),
            ],
        )
        header = self._header(path, record if exists else None, key)
        _, wanted = check_range(path, header.size_bytes, start, length)
        size, data = (apart_size, apart) if header.place == "a" else (inline_size - HEADER_BYTES, inline)
        self._check_there(path, data if exists == (2 if header.place == "a" else 1) else None)
        if size != header.size_bytes:
            raise Corrupt(f"{path}: {size} bytes in Redis instead of the {header.size_bytes} that were written")
        return bytes(data[:wanted])

    def list(self, prefix: str) -> list[str]:
        names = self._scan(prefix)
        return sorted(name.decode()[len(self.root) :] for name in names if not name.endswith(b"#"))

    def wait(self, key: str, timeout_s: float) -> bool:
        name, end = self._name(key), time.monotonic() + timeout_s

        def there() -> bool:
            return bool(self._send(key, lambda: [("EXISTS", name)])[0])

        if there():
            return True
        if timeout_s <= 0:
            return False
        with self._away(key), self.client.pubsub(ignore_subscribe_messages=True) as messages:  # type: ignore[no-untyped-call]
            messages.subscribe(name)
            while not there():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                messages.get_message(timeout=min(left, LOOK_AGAIN_S))
        return True

    def delete(self, prefix: str) -> int:
        names = self._scan(prefix)
        values = [name for name in names if not name.endswith(b"#")]
        apart = [name for name in names if name.endswith(b"#")]
        deleted = 0
        for chosen, counted in ((values, 1), (apart, 0)):
            for at in range(0, len(chosen), 1000):
                batch = chosen[at : at + 1000]
                deleted += counted * self._send(prefix, lambda batch=batch: [("UNLINK", *batch)])[0]  # type: ignore[misc]
        return deleted

    def exists(self, key: str) -> bool:
        return self.wait(key, 0)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by one at a time, for `lock_s` at most (a holder that dies frees it so). Raises Unavailable."""
        name, token, end = f"{self._name(key)}#lock", uuid.uuid4().hex, time.monotonic() + 2 * self.lock_s
        held = ("PX", int(self.lock_s * 1000), "NX")
        while self._send(key, lambda: [("SET", name, token, *held)])[0] is None:
            if time.monotonic() > end:
                raise Unavailable(
                    f"{key}: its lock in Redis stayed taken for {2 * self.lock_s:.0f} s", f"Redis {self.name}"
                )
            time.sleep(0.005)
        try:
            yield
        finally:
            self._send(key, lambda: [("EVAL", _RELEASE, 1, name, token)])

    def _run_write(self, key: str, name: str, record: Buffers, expiry: Expiry, condition: str) -> bytes | None:
        """Writes the record by _WRITE; the header that was there before."""
        arguments = (2, name, name + "#", b"".join(record), expiry[-1] if expiry else "", condition, HEADER_BYTES - 1)
        try:
            (before,) = self._send(key, lambda: [("EVALSHA", _WRITE_SHA, *arguments)])
        except ExchangeError as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
            (before,) = self._send(key, lambda: [("EVAL", _WRITE, *arguments)])
        return None if before is None else bytes(before)

    # -- one key

    def _name(self, key: str) -> str:
        return self.root + check_key(key)

    def _prepare(self, key: str, data: Data, lifetime_s: float | None) -> tuple[str, Views, int, Expiry]:
        """(name, buffers, size, expiry arguments of SET)"""
        buffers = views(data)
        size = sum(view.nbytes for view in buffers)
        if size > MAX_BYTES - HEADER_BYTES:
            raise Unsuitable(f"{key}: {size} bytes, but Redis takes 512 MB a value (tiered+s3:// puts such into S3)")
        lifetime = check_lifetime(key, lifetime_s)
        expiry = () if lifetime is None else ("PX", max(1, int(lifetime * 1000)))
        return self._name(key), buffers, size, expiry

    def _header(self, path: str, record: bytes | None, key: str | Ref) -> Header:
        if record is None:
            raise NotFound(f"{path}: no such value in Redis {self.name}", path)
        header = Header.decode(path, record)
        if header.place == "s":
            raise NotFound(f"{path}: its value is not in Redis but in S3", path)
        if isinstance(key, Ref) and (key.size_bytes, key.checksum) != (header.size_bytes, header.checksum):
            raise Corrupt(f"{path}: the value in Redis is not the one that was referred to ({key})")
        return header

    def _check_there(self, path: str, data: bytes | None) -> None:
        if data is None:
            raise NotFound(f"{path}: Redis {self.name} evicted its bytes", path)

    def _scan(self, prefix: str) -> Names:
        pattern = self.root + check_prefix(prefix) + "*"
        with self._away(prefix or "listing"):
            found: Iterable[bytes] = self.client.scan_iter(match=pattern, count=1000)
            return sorted({name for name in found if not name.endswith(b"#lock")})

    # -- talking

    def _send(self, key: str, commands: Callable[[], Iterable[Command]]) -> Replies:
        """The answers, in order. `commands` is called again for every attempt."""
        return self._with_connection(key, lambda connection: converse(connection, commands()))

    def _with_connection(self, key: str, action: Callable[[Any], T]) -> T:
        """`action` with a connection of its own, repeated when the connection breaks: it must be repeatable."""
        for pause in (*RETRY_PAUSES_S, None):
            try:
                with self._away(key):
                    connection = self.client.connection_pool.get_connection()
                    try:
                        return action(connection)
                    except BaseException:
                        connection.disconnect()  # type: ignore[no-untyped-call]
                        raise
                    finally:
                        self.client.connection_pool.release(connection)
            except Unavailable as error:
                if pause is None or not isinstance(error.__cause__, redis.ConnectionError | redis.TimeoutError):
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _away(self, key: str) -> Iterator[None]:
        """The one boundary where Redis' failures become the exchange's."""
        try:
            yield
        except NoPermissionError as error:
            raise Unsuitable(f"{key}: Redis {self.name} refuses us: {error}") from error
        except (AuthenticationError, AuthorizationError) as error:
            if (self.user or "").startswith(MADE):
                message = f"{key}: Redis {self.name} has lost our user, which the job API makes again: {error}"
                raise Unavailable(message, f"Redis {self.name}") from error
            raise Unsuitable(f"{key}: Redis {self.name} refuses us: {error} (REDIS_PASSWORD?)") from error
        except OutOfMemoryError as error:
            raise Full(key, f"Redis {self.name}", "maxmemory") from error
        except (redis.ConnectionError, redis.TimeoutError, BusyLoadingError, ReadOnlyError) as error:
            raise Unavailable(f"{key}: Redis {self.name} does not answer: {error}", f"Redis {self.name}") from error
        except ResponseError as error:
            if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                raise Unsuitable(f"{key}: Redis {self.name} refuses us: {error} (REDIS_PASSWORD?)") from error
            if "EXECABORT" in str(error) or "OOM" in str(error):
                raise Full(key, f"Redis {self.name}", "maxmemory") from error
            raise ExchangeError(f"{key}: Redis {self.name}: {error}") from error
        except RedisError as error:
            raise ExchangeError(f"{key}: Redis {self.name}: {error}") from error


def _place(before: bytes | None) -> str:
    if before is None:
        return ""
    try:
        return Header.decode("", before).place
    except Corrupt:
        return "s"
