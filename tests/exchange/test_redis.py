"""The exchange in Redis: the conformance suite against a real server, and what only Redis can suffer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from functions.exchange.base import Full, NotFound, Unsuitable
from functions.exchange.open import open_exchange
from functions.exchange.redis import RedisExchange
from tests.exchange.conformance import Backend, Conformance, noise
from tests.exchange.servers import LOOPBACK, LosesAnswers, Meanwhile, RedisServer
from tests.support.waiting import until


class RawRedis:
    """The record of a small value; of a large one its bytes, which lie apart."""

    def __init__(self, server: RedisServer) -> None:
        self.client = redis.Redis.from_url(server.url)

    def name(self, key: str) -> str:
        return f"rlhf/{key}#" if self.client.exists(f"rlhf/{key}#") else f"rlhf/{key}"

    def read(self, key: str) -> bytes:
        stored = self.client.get(self.name(key))
        assert isinstance(stored, bytes)
        return stored

    def write(self, key: str, stored: bytes) -> None:
        self.client.set(self.name(key), stored)


class TestRedis(Conformance):
    @pytest.fixture
    def backend(self, redis_server: RedisServer) -> Iterator[Backend]:
        raw = RawRedis(redis_server)
        yield Backend(redis_server.url, raw)
        raw.client.close()

    @pytest.fixture
    def dying(self, fresh_redis: RedisServer) -> Iterator[Backend]:
        raw = RawRedis(fresh_redis)
        yield Backend(fresh_redis.url, raw, fresh_redis.stop)
        raw.client.close()


@pytest.fixture
def exchange(fresh_redis: RedisServer) -> RedisExchange:
    return RedisExchange(fresh_redis.url, "rlhf/job/")


def names(exchange: RedisExchange) -> list[str]:
    return sorted(name.decode() for name in exchange.client.scan_iter())


def test_nothing_stays_behind(exchange: RedisExchange) -> None:
    """A small value over a large one, expiry and deletion take the bytes that lie apart with them."""
    exchange.put("a", noise(100_000))
    exchange.put("a", b"small")
    assert names(exchange) == ["rlhf/job/a"]
    exchange.put("b", noise(100_000), lifetime_s=600)
    exchange.put_if_absent("c", noise(100_000), lifetime_s=600)
    assert len(names(exchange)) == 5
    exchange.put("b", noise(100_000), lifetime_s=0.1)
    exchange.delete("c")
    exchange.put_if_absent("c", noise(100_000), lifetime_s=0.1)
    until(lambda: names(exchange) == ["rlhf/job/a"])
    exchange.put("d", noise(100_000))
    assert exchange.delete("") == 2
    assert names(exchange) == []


def test_a_value_over_the_limit_is_refused_before_it_is_sent(exchange: RedisExchange) -> None:
    half = memoryview(bytearray(256 << 20))
    with pytest.raises(Unsuitable, match=r"k: 536870912 bytes, but Redis takes 512 MB a value \(tiered"):
        exchange.put("k", [half, half])


def test_evicted_bytes_are_absent_not_corrupt(exchange: RedisExchange) -> None:
    exchange.put("k", noise(100_000))
    exchange.client.delete("rlhf/job/k#")
    with pytest.raises(NotFound, match=r"k: Redis .* evicted"):
        exchange.get("k")
    with pytest.raises(NotFound, match=r"k: Redis .* evicted"):
        exchange.get("k", start=1, length=1)


@pytest.mark.parametrize("size", [20_000, 8 << 20])
def test_no_room_is_told_and_nothing_is_written(exchange: RedisExchange, size: int) -> None:
    exchange.put("warm", b"")
    exchange.client.config_set("maxmemory", 1)
    for put in (exchange.put, exchange.put_if_absent):
        with pytest.raises(
            Full, match=r"^x: Redis .* is full \(maxmemory\); nothing was written: make room by deleting"
        ):
            put("x", noise(size))
    assert exchange.list("x") == []
    exchange.client.config_set("maxmemory", 0)
    assert exchange.put_if_absent("x", noise(size)) is not None


def test_a_password_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path, "--requirepass", "open-sesame")
    try:
        server.start()
        for password in ("", "wrong"):
            monkeypatch.setenv("REDIS_PASSWORD", password)
            with pytest.raises(Unsuitable, match=r"refuses us: .* \(REDIS_PASSWORD\?\)"):
                open_exchange(server.url, "job")
        monkeypatch.setenv("REDIS_PASSWORD", "open-sesame")
        open_exchange(server.url, "job").put("k", b"v")
    finally:
        server.stop()


def test_a_unix_socket_will_do(redis_server: RedisServer) -> None:
    exchange = open_exchange(f"unix://{redis_server.unix}", "unix")
    data = noise(300_000)
    assert exchange.get(exchange.put("k", data)) == data
    exchange.delete("")


def test_a_restarted_server_is_used_again(fresh_redis: RedisServer, exchange: RedisExchange) -> None:
    """The pool's connections are dead, the script is forgotten: neither is the caller's business."""
    exchange.put("k", b"v")
    fresh_redis.stop()
    fresh_redis.start()
    assert exchange.put_if_absent("k", b"w") is not None
    assert exchange.get("k") == b"w"


def test_a_winner_whose_answer_was_lost_still_knows(fresh_redis: RedisServer) -> None:
    relay = LosesAnswers(fresh_redis.port)
    try:
        exchange = RedisExchange(f"redis://{LOOPBACK}:{relay.port}/0", "rlhf/job/")
        exchange.put("warm", b"")  # the script is loaded
        relay.armed.set()
        assert exchange.put_if_absent("k", b"v") is not None
        assert not relay.armed.is_set()
        assert exchange.put_if_absent("k", b"v") is None
    finally:
        relay.stop()


def test_a_large_put_loses_its_race_midway(fresh_redis: RedisServer, exchange: RedisExchange) -> None:
    """Somebody writes between the look and the transaction: the transaction must not go through."""
    relay = Meanwhile(fresh_redis.port, b"MULTI", lambda: exchange.put("k", b"other"))
    try:
        late = RedisExchange(f"redis://{LOOPBACK}:{relay.port}/0", "rlhf/job/")
        assert late.put_if_absent("k", noise(100_000)) is None
        assert relay.done.is_set()
        assert exchange.get("k") == b"other"
    finally:
        relay.stop()


def test_the_lock_is_one_at_a_time_and_ends_with_its_holder(fresh_redis: RedisServer, exchange: RedisExchange) -> None:
    class Briefly(RedisExchange):
        lock_s = 0.2

    order: list[str] = []

    def commands(name: str) -> int:
        return int(exchange.client.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0))

    def second() -> None:
        with exchange.lock("k"):
            order.append("second")

    thread = threading.Thread(target=second)
    with exchange.lock("k"):
        thread.start()
        until(lambda: commands("set") > 1)  # the second has asked, and was refused
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    held = Briefly(fresh_redis.url, "rlhf/job/").lock("k")
    held.__enter__()  # by a holder that dies, not to be released by this
    second()
    assert order == ["first", "second", "second"]
    assert exchange.list("") == []
