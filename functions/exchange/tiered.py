"""Redis and S3 as one exchange: small values where they are fast, large and committed ones where they last.

    put, up to SMALL_BYTES    Redis only; with it goes whatever Redis loses
    put, longer               S3, then a record in Redis that says so (and wakes those who wait)
    put_if_absent             S3 decides (a commit must survive Redis), then the same record, or a copy where small
    get, wait, list           Redis first; what it does not know is looked for in S3
    durable                   the S3 side alone: the journal and the weights

Losing Redis loses small plain values, which a resumed job writes again, and no others. One thing is not mended then:
a small value put over one that lies in S3 gives way to the older again; a Ref refuses that one (Corrupt).
Where the store refuses conditional puts (501), a lock in Redis fences them: a Redis lost in the middle of such a put,
or a writer that stalls longer than the lock lasts, can then let two win. A store with conditional puts has no such gap.
"""

import contextlib
import time

from functions.base.wire import Ref
from functions.exchange.base import Data, Exchange, NotFound, Unavailable, views
from functions.exchange.redis import INLINE_BYTES, RedisExchange
from functions.exchange.s3 import S3Exchange

SMALL_BYTES = INLINE_BYTES
"""Up to here Redis answers in one round trip of a tenth of a millisecond; S3 takes ten and more."""
LOOK_IN_S3_S = 2.0
"""`wait` looks into S3 so often: only a writer whose Redis was lost in between announces nothing."""
LOOKS = 5
"""`get` looks so often for a value that Redis knows and S3 does not: one that a put has just made small."""

Keys = list[str]


class TieredExchange:
    """See `Exchange`."""

    def __init__(self, redis: RedisExchange, s3: S3Exchange, durable: Exchange | None = None) -> None:
        """`durable`: `s3` with what lies over it (node.py)."""
        self.redis = redis
        self.s3 = s3
        self.durable: Exchange = durable or s3

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        if _size(data) > SMALL_BYTES:
            ref = self.s3.put(key, data, lifetime_s=lifetime_s)
            self.redis.announce(ref, lifetime_s)
            return ref
        ref, before = self.redis.store(key, data, lifetime_s)
        if before in ("s", "c"):
            self.s3.remove(key)
        return ref

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        if self.redis.exists(key):
            return None
        ref = self.s3.put_if_absent(key, data, lifetime_s=lifetime_s)
        if ref is None:
            return None
        with contextlib.suppress(Unavailable):  # it is won and lies in S3: no failure of Redis may say otherwise
            if ref.size_bytes <= SMALL_BYTES:
                self.redis.store(key, data, lifetime_s, place="c")
            else:
                self.redis.announce(ref, lifetime_s)
        return ref

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        path = key.key if isinstance(key, Ref) else key
        looks_left = LOOKS
        while True:
            with contextlib.suppress(NotFound):
                return self.redis.get(key, start=start, length=length)
            try:
                return self.s3.get(key, start=start, length=length)
            except NotFound:
                looks_left -= 1
                if looks_left == 0 or not self.redis.exists(path):
                    raise

    def list(self, prefix: str) -> Keys:
        return sorted({*self.redis.list(prefix), *self.s3.list(prefix)})

    def wait(self, key: str, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not (self.redis.exists(key) or self.s3.exists(key)):
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.redis.wait(key, min(left, LOOK_IN_S3_S))
        return True

    def delete(self, prefix: str) -> int:
        keys = self.list(prefix)
        self.s3.delete(prefix)
        self.redis.delete(prefix)
        return len(keys)


def _size(data: Data) -> int:
    return sum(view.nbytes for view in views(data))
