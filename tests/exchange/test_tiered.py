"""Redis and S3 as one exchange: the conformance suite against real servers, and what happens between the two."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from functions.base.wire import Call, Event
from functions.call.function import Context, RetryableError
from functions.exchange.base import Corrupt, NotFound, Unavailable
from functions.exchange.open import open_exchange
from functions.exchange.redis import RedisExchange
from functions.exchange.s3 import S3Exchange
from functions.exchange.tiered import SMALL_BYTES, TieredExchange
from functions.server.attempt import Attempt
from tests.exchange.conformance import Backend, Conformance, noise
from tests.exchange.servers import LOOPBACK, BadS3, Meanwhile, MotoServer, RedisServer, S3Server
from tests.exchange.test_redis import RawRedis
from tests.exchange.test_s3 import RawS3

Credentials = Callable[[S3Server], None]
LARGE = SMALL_BYTES + 1


def url(endpoint: str, redis: RedisServer, prefix: str = "tests") -> str:
    return f"tiered+s3://bucket/{prefix}?endpoint={endpoint}&redis={redis.url}"


class RawTiers:
    def __init__(self, redis: RedisServer, s3: S3Server) -> None:
        self.redis = RawRedis(redis)
        self.s3 = RawS3(s3)

    def tier(self, key: str) -> RawRedis | RawS3:
        record = self.redis.client.get(f"rlhf/{key}")
        return self.s3 if isinstance(record, bytes) and b" at=s\n" in record[:100] else self.redis

    def read(self, key: str) -> bytes:
        return self.tier(key).read(key)

    def write(self, key: str, stored: bytes) -> None:
        self.tier(key).write(key, stored)

    def close(self) -> None:
        self.redis.client.close()
        self.s3.client.close()


class TestTiered(Conformance):
    @pytest.fixture
    def backend(
        self, redis_server: RedisServer, moto_server: MotoServer, credentials: Credentials
    ) -> Iterator[Backend]:
        credentials(moto_server)
        raw = RawTiers(redis_server, moto_server)
        yield Backend(url(moto_server.endpoint, redis_server), raw)
        raw.close()

    @pytest.fixture
    def dying(self, fresh_redis: RedisServer, fresh_moto: MotoServer, credentials: Credentials) -> Iterator[Backend]:
        def stop() -> None:
            fresh_redis.stop()
            fresh_moto.stop()

        credentials(fresh_moto)
        raw = RawTiers(fresh_redis, fresh_moto)
        yield Backend(url(fresh_moto.endpoint, fresh_redis), raw, stop)
        raw.close()


class Dies:
    """A function that makes a small value and dies before it has finished; its next attempt finishes."""

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if list(context.prior):
            yield Event("done")
            return
        yield Event("samples", ref=context.exchange.put(f"{call.prefix}samples.0000", b"made"))
        raise RetryableError("dies")


def test_what_a_call_has_made_outlives_redis_as_its_record_does(
    fresh_redis: RedisServer, moto_server: MotoServer, credentials: Credentials, tmp_path: Path
) -> None:
    """Found by scripts/chaos: the record told of samples that had gone with Redis, and no resume could go on."""
    credentials(moto_server)
    for attempt in range(2):
        exchange = open_exchange(url(moto_server.endpoint, fresh_redis), "outlives")
        lines: list[bytes] = []
        Attempt(Call("c", "generate"), lines.append).run(Dies, lambda: exchange, str(tmp_path))  # noqa: B023
        refs = [event.ref for event in map(Event.from_line, lines) if event.ref is not None]
        assert [exchange.get(ref) for ref in refs] == [b"made"]
        if attempt == 0:
            RawRedis(fresh_redis).client.flushall()
    assert Event.from_line(lines[-1]).kind == "done"


def test_a_value_is_found_while_it_moves_between_redis_and_s3(
    redis_server: RedisServer, moto_server: MotoServer, credentials: Credentials
) -> None:
    """Small and large in turn: a reader that saw the record of the large one may find S3 empty already."""
    credentials(moto_server)
    place = url(moto_server.endpoint, redis_server)
    writing, reading = open_exchange(place, "moving"), open_exchange(place, "moving")
    writing.put("k", b"1" * LARGE)
    written = threading.Event()

    def write() -> None:
        for _ in range(60):
            writing.put("k", b"1")
            writing.put("k", b"1" * LARGE)
        written.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(write)
        reads = 0
        while not written.is_set() and not done.done():
            assert len(reading.get("k")) in (1, LARGE)
            reads += 1
        done.result()
    assert reads > 10


def test_a_value_that_s3_has_lost_is_not_found(
    redis_server: RedisServer, moto_server: MotoServer, credentials: Credentials
) -> None:
    credentials(moto_server)
    exchange = open_exchange(url(moto_server.endpoint, redis_server), "lost")
    assert isinstance(exchange, TieredExchange)
    exchange.put("k", b"1" * LARGE)
    exchange.s3.delete("k")
    with pytest.raises(NotFound, match="no such value in s3://bucket"):
        exchange.get("k")


@pytest.mark.slow
class TestFenced(Conformance):
    """The same over a store that refuses conditional puts: Redis fences them."""

    big_bytes = 2 << 20

    @pytest.fixture
    def backend(
        self, redis_server: RedisServer, moto_server: MotoServer, credentials: Credentials
    ) -> Iterator[Backend]:
        credentials(moto_server)
        proxy = BadS3(moto_server, "refuses").start()
        raw = RawTiers(redis_server, moto_server)
        yield Backend(url(proxy.endpoint, redis_server), raw)
        raw.close()
        proxy.stop()

    @pytest.fixture
    def dying(self, fresh_redis: RedisServer, backend: Backend, moto_server: MotoServer) -> Backend:
        """Only its Redis goes."""
        endpoint = backend.url.partition("endpoint=")[2].partition("&")[0]
        return Backend(url(endpoint, fresh_redis), backend.raw, fresh_redis.stop)


@pytest.fixture
def exchange(
    fresh_redis: RedisServer, moto_server: MotoServer, credentials: Credentials, request: pytest.FixtureRequest
) -> TieredExchange:
    credentials(moto_server)
    opened = open_exchange(url(moto_server.endpoint, fresh_redis, "own"), request.node.name[:60])
    assert isinstance(opened, TieredExchange)
    return opened


def tiers(exchange: TieredExchange) -> tuple[RedisExchange, S3Exchange]:
    return exchange.redis, exchange.s3


def test_small_goes_to_redis_large_and_committed_to_s3(exchange: TieredExchange) -> None:
    redis, s3 = tiers(exchange)
    exchange.put("small", noise(SMALL_BYTES))
    exchange.put("large", noise(LARGE))
    exchange.put_if_absent("committed", b"v")
    assert s3.list("") == ["committed", "large"]
    assert redis.get("small") == noise(SMALL_BYTES)
    assert redis.get("committed") == b"v"
    with pytest.raises(NotFound, match="not in Redis but in S3"):
        redis.get("large")


def test_losing_redis_loses_only_small_plain_values(fresh_redis: RedisServer, exchange: TieredExchange) -> None:
    exchange.put("small", b"v")
    large = exchange.put("large", noise(LARGE))
    committed = exchange.put_if_absent("committed", b"v")
    committed_large = exchange.put_if_absent("committed-large", noise(LARGE))
    assert committed is not None
    assert committed_large is not None
    fresh_redis.stop()
    fresh_redis.start()
    assert exchange.list("") == ["committed", "committed-large", "large"]
    assert exchange.get(large) == exchange.get(committed_large) == noise(LARGE)
    assert exchange.get(committed) == b"v"
    assert exchange.get("large", start=5, length=3) == noise(LARGE)[5:8]
    assert exchange.wait("committed", 0)
    assert exchange.put_if_absent("committed", b"other") is None
    assert exchange.put_if_absent("large", b"other") is None
    with pytest.raises(NotFound, match="small"):
        exchange.get("small")
    assert exchange.put_if_absent("small", b"again") is not None


def test_a_small_value_over_a_large_one_is_the_only_one(fresh_redis: RedisServer, exchange: TieredExchange) -> None:
    exchange.put("k", noise(LARGE))
    exchange.put("k", b"small")
    exchange.put_if_absent("c", b"committed")
    exchange.put("c", b"changed")
    assert exchange.get("k") == b"small"
    assert exchange.get("c") == b"changed"
    assert exchange.s3.list("") == []


def test_an_older_value_that_comes_up_again_is_refused_by_its_ref(
    fresh_redis: RedisServer, exchange: TieredExchange
) -> None:
    """The one thing that is not mended: two losses of Redis around a replacement."""
    exchange.put("k", noise(LARGE))
    fresh_redis.stop()
    fresh_redis.start()
    ref = exchange.put("k", b"small")
    fresh_redis.stop()
    fresh_redis.start()
    with pytest.raises(Corrupt, match=r"k: the value .* not the one"):
        exchange.get(ref)


def test_a_commit_that_redis_does_not_hear_of_is_a_commit(
    fresh_redis: RedisServer, moto_server: MotoServer, credentials: Credentials
) -> None:
    """Redis dies while S3 decides."""
    credentials(moto_server)
    relay = Meanwhile(moto_server.port, b"PUT /bucket/own/unheard/k", fresh_redis.stop)
    try:
        exchange = open_exchange(url(f"http://{LOOPBACK}:{relay.port}", fresh_redis, "own"), "unheard")
        ref = exchange.put_if_absent("k", b"v")
        assert relay.done.is_set()
        assert ref is not None
        assert exchange.durable.get(ref) == b"v"
        with pytest.raises(Unavailable):
            exchange.get("k")
    finally:
        relay.stop()


def test_a_store_that_ignores_conditional_puts_is_refused_here_too(
    redis_server: RedisServer, moto_server: MotoServer, credentials: Credentials
) -> None:
    credentials(moto_server)
    proxy = BadS3(moto_server, "ignores").start()
    try:
        with pytest.raises(Exception, match="silently ignores conditional puts"):
            open_exchange(url(proxy.endpoint, redis_server, "ignoring"), "job")
    finally:
        proxy.stop()


def test_redis_fences_a_store_that_refuses_conditional_puts(
    redis_server: RedisServer, moto_server: MotoServer, credentials: Credentials
) -> None:
    credentials(moto_server)
    proxy = BadS3(moto_server, "refuses").start()
    try:
        exchange = open_exchange(url(proxy.endpoint, redis_server, "fenced"), "job")
        for race in range(3):
            for part in (exchange, exchange.durable):
                key = f"{race}/{'durable' if part is exchange.durable else 'tiered'}"
                with concurrent.futures.ThreadPoolExecutor(8) as pool:
                    won = list(pool.map(lambda n: part.put_if_absent(key, b"v" * LARGE) is not None, range(8)))  # noqa: B023
                assert won.count(True) == 1
    finally:
        proxy.stop()
