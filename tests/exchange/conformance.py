"""What every exchange must do. Each backend's tests inherit `Conformance` and say how to open, break and stop it.

(The pattern of fsspec's tests/abstract: one suite, a fixture per backend.)
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import random
import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from functions.base.wire import Ref
from functions.exchange.base import Buffer, Corrupt, Exchange, NotFound, Unavailable, checksum
from functions.exchange.open import open_exchange
from tests.support.forked import CONTEXT
from tests.support.waiting import until

MB = 1 << 20
SIZES = (0, 1, 100, 65_536, 65_537, 3 * MB + 1)
ODD_KEYS = ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a b", "a\n", "a*", "ä", "a?", "a#", "a+b", "a\\b", "a\0"]
ODD_KEYS += ["x" * 201, "/".join(["x" * 100] * 6)]


class RawStore(Protocol):
    """The store behind the exchange's back, to damage what lies in it."""

    def read(self, key: str) -> bytes: ...

    def write(self, key: str, stored: bytes) -> None: ...


@dataclass
class Backend:
    """One store under test. `url` opens it in other processes too; `stop` takes it away for good."""

    url: str
    raw: RawStore
    stop: Callable[[], None] = field(default=lambda: None)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def credentials() -> dict[str, str]:
    """For processes of the fork server, which has the environment of its first use."""
    return {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "REDIS_"))}


def put_forever(url: str, job: str, environment: dict[str, str], key: str, sizes: tuple[int, ...]) -> None:
    """Writes values of one repeated byte, until it is killed."""
    os.environ.update(environment)
    exchange = open_exchange(url, job)
    for number in range(1_000_000):
        exchange.put(key, bytes([number % 251]) * sizes[number % len(sizes)])


def contend(url: str, job: str, environment: dict[str, str], keys: list[str], number: int, count: int) -> list[bool]:
    """Whether this process won each key. It begins when all `count` are there."""
    os.environ.update(environment)
    exchange = open_exchange(url, job)
    exchange.put(f"ready/{number}", b"")
    for other in range(count):
        assert exchange.wait(f"ready/{other}", 100)
    return [exchange.put_if_absent(key, bytes([number]) * 9) is not None for key in keys]


class Conformance:
    lifetime_s = 0.2
    """Of what expires within a test."""
    big_bytes = 33 * MB

    @pytest.fixture
    def job(self) -> str:
        return f"job-{uuid.uuid4().hex[:12]}"

    @pytest.fixture
    def exchange(self, backend: Backend, job: str) -> Exchange:
        return open_exchange(backend.url, job)

    # -- values

    def test_a_value_comes_back_as_it_was_put(self, exchange: Exchange) -> None:
        for size in SIZES:
            data = noise(size)
            ref = exchange.put(f"a/b.c/d-e_{size}", data)
            assert ref == Ref(f"a/b.c/d-e_{size}", size, checksum(data))
            back = exchange.get(ref)
            assert type(back) is bytes
            assert back == exchange.get(ref.key) == data

    @pytest.mark.parametrize("conditional", [False, True])
    @pytest.mark.parametrize("lifetime_s", [None, 60.0])
    def test_a_sequence_of_buffers_is_their_concatenation(
        self, exchange: Exchange, conditional: bool, lifetime_s: float | None
    ) -> None:
        whole = noise(5 * MB)
        cuts = [0, 0, 1, 70_000, 70_000, 2 * MB, 5 * MB]
        pieces: list[Buffer] = [memoryview(whole)[a:b] for a, b in itertools.pairwise(cuts)]
        pieces[1], pieces[3] = bytes(pieces[1]), bytearray(pieces[3])
        put = exchange.put_if_absent if conditional else exchange.put
        ref = put("k", pieces, lifetime_s=lifetime_s)
        assert ref == Ref("k", len(whole), checksum(whole))
        assert exchange.get(ref) == whole
        assert exchange.get(ref, start=69_999, length=3) == whole[69_999:70_002]
        assert exchange.get(ref, start=4 * MB) == whole[4 * MB :]
        assert exchange.put("k", []).size_bytes == 0
        assert exchange.get("k") == b""

    def test_a_typed_view_is_its_bytes(self, exchange: Exchange) -> None:
        numbers = memoryview(noise(800)).cast("i", (10, 20))
        assert exchange.get(exchange.put("k", numbers)) == numbers.tobytes()

    def test_big_values(self, exchange: Exchange) -> None:
        data = noise(self.big_bytes)
        ref = exchange.put("big", [data[:1000], data[1000:]], lifetime_s=600)
        assert exchange.get(ref) == data
        assert exchange.get(ref, start=self.big_bytes - 10) == data[-10:]
        assert exchange.put_if_absent("big", data) is None
        assert exchange.put_if_absent("big2", data) == Ref("big2", len(data), checksum(data))
        assert exchange.get("big2") == data

    def test_put_replaces_whatever_the_sizes(self, exchange: Exchange) -> None:
        for number, size in enumerate((10, 2 * MB, 0, 3 * MB, 70_000, 1)):
            data = noise(size, number)
            exchange.put("k", data)
            assert exchange.get("k") == data
            assert exchange.list("") == ["k"]

    def test_many_threads_at_once(self, exchange: Exchange) -> None:
        def work(number: int) -> bool:
            data = noise(1000 * number * number, number)
            ref = exchange.put(f"t/{number}", data)
            return exchange.get(ref) == data

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(32)))
        assert len(exchange.list("t/")) == 32

    # -- keys

    def test_odd_keys_are_refused_by_every_method(self, exchange: Exchange) -> None:
        one: tuple[Callable[[str], object], ...] = (
            lambda key: exchange.put(key, b""),
            lambda key: exchange.put_if_absent(key, b""),
            lambda key: exchange.get(key),
            lambda key: exchange.wait(key, 0),
        )
        for key in ODD_KEYS:
            for method in one if key in ("", "a/") else (*one, exchange.list, exchange.delete):
                with pytest.raises(ValueError, match="exchange key"):
                    method(key)

    def test_list_and_delete_by_prefix(self, exchange: Exchange) -> None:
        keys = ["a/b/1", "a/b/2", "a/bc", "ab/1", "b", "a/c/d/e"]
        for key in keys:
            exchange.put(key, b"v" * 70_000 if key == "a/b/2" else b"v")
        assert exchange.list("") == sorted(keys)
        assert exchange.list("a/") == ["a/b/1", "a/b/2", "a/bc", "a/c/d/e"]
        assert exchange.list("a/b") == ["a/b/1", "a/b/2", "a/bc"]
        assert exchange.list("a/b/") == ["a/b/1", "a/b/2"]
        assert exchange.list("a/b/1") == ["a/b/1"]
        assert exchange.list("none/") == exchange.list("b/") == []
        assert exchange.delete("a/b") == 3
        assert exchange.delete("a/b") == 0
        assert exchange.list("") == ["a/c/d/e", "ab/1", "b"]
        with pytest.raises(NotFound, match="a/b/2"):
            exchange.get("a/b/2")
        exchange.put("a/b/2", b"again")
        assert exchange.get("a/b/2") == b"again"
        assert exchange.delete("") == 4
        assert exchange.list("") == []

    def test_jobs_do_not_see_each_other(self, backend: Backend, exchange: Exchange, job: str) -> None:
        other = open_exchange(backend.url, f"{job}-other")
        exchange.put("k", b"mine")
        assert other.list("") == []
        assert other.put_if_absent("k", b"other's") is not None
        assert other.delete("") == 1
        assert exchange.get("k") == b"mine"

    # -- ranges

    @pytest.mark.parametrize("size", [10, 200_000])
    @pytest.mark.parametrize("lifetime_s", [None, 60.0])
    def test_ranges_and_their_bounds(self, exchange: Exchange, size: int, lifetime_s: float | None) -> None:
        data = noise(size)
        ref = exchange.put("k", data, lifetime_s=lifetime_s)
        for start, length in ((0, size), (0, 0), (0, 1), (3, 4), (size - 1, 1), (size, 0), (5, None), (size, None)):
            expected = data[start:] if length is None else data[start : start + length]
            assert exchange.get(ref, start=start, length=length) == expected, (start, length)
        for start, length in (
            (-1, 1),
            (0, -1),
            (0, size + 1),
            (size - 1, 2),
            (size + 1, 0),
            (size + 1, None),
            (-1, None),
        ):
            with pytest.raises(ValueError, match=r"k: start .* outside the value's"):
                exchange.get(ref, start=start, length=length)
        with pytest.raises(NotFound, match="nothing"):
            exchange.get("nothing", start=1, length=2)

    # -- damage

    @pytest.mark.parametrize("size", [300, 200_000])
    def test_truncated_altered_or_foreign_values_are_refused(
        self, backend: Backend, exchange: Exchange, job: str, size: int
    ) -> None:
        data = noise(size)
        exchange.put("d/k", data)
        stored = backend.raw.read(f"{job}/d/k")
        at = stored.index(data[100:200]) + 50
        flipped = stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        for damaged in (flipped, stored[:-1], stored[:at], stored + b"x", b""):
            backend.raw.write(f"{job}/d/k", damaged)
            with pytest.raises(Corrupt, match="d/k"):
                exchange.get("d/k")
            if damaged is not flipped:  # ranges are checked for size, their readers check hashes of their own
                with pytest.raises(Corrupt, match="d/k"):
                    exchange.get("d/k", start=1, length=2)
        assert exchange.put_if_absent("d/k", b"other") is None
        backend.raw.write(f"{job}/d/k", stored)
        assert exchange.get("d/k") == data

    def test_a_value_other_than_the_ref_says_is_refused(self, exchange: Exchange) -> None:
        ref = exchange.put("k", b"first")
        exchange.put("k", b"other")
        for key in (ref, Ref("k", 4, checksum(b"other"))):
            with pytest.raises(Corrupt, match=r"k: the value .* not the one"):
                exchange.get(key)
            with pytest.raises(Corrupt, match=r"k: the value .* not the one"):
                exchange.get(key, start=1, length=2)
        assert exchange.get("k") == b"other"

    def test_a_reader_never_sees_half_of_a_killed_writers_value(
        self, backend: Backend, exchange: Exchange, job: str
    ) -> None:
        sizes = (50_000, 1_000_000, 10)
        for round_number in range(3):
            writer = CONTEXT.Process(target=put_forever, args=(backend.url, job, credentials(), "k", sizes))
            writer.start()
            assert exchange.wait("k", 100)
            seen = set[bytes]()
            while len(seen) < 3 + round_number:  # values, the last of them while another is under way
                value = exchange.get("k")
                assert len(value) in sizes
                assert value == value[:1] * len(value)
                seen.add(value[:1])
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            value = exchange.get("k")
            assert len(value) in sizes
            assert value == value[:1] * len(value)
            assert exchange.list("") == ["k"]

    # -- one winner

    @pytest.mark.parametrize("size", [8, 100_000])
    def test_one_winner_of_eight_threads(self, exchange: Exchange, size: int) -> None:
        barrier = threading.Barrier(8)

        def contender(number: int, key: str) -> bool:
            barrier.wait()
            return exchange.put_if_absent(key, bytes([number]) * size) is not None

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for race in range(6):
                won = list(pool.map(contender, range(8), [f"race/{race}"] * 8))
                assert won.count(True) == 1
                assert exchange.get(f"race/{race}") == bytes([won.index(True)]) * size

    def test_one_winner_among_processes(self, backend: Backend, exchange: Exchange, job: str) -> None:
        keys = [f"race/{number}" for number in range(10)]
        with concurrent.futures.ProcessPoolExecutor(3, mp_context=CONTEXT) as pool:
            futures = [pool.submit(contend, backend.url, job, credentials(), keys, n, 3) for n in range(3)]
            won = [future.result() for future in futures]
        for number, key in enumerate(keys):
            winners = [process for process in range(3) if won[process][number]]
            assert len(winners) == 1
            assert exchange.get(key) == bytes([winners[0]]) * 9

    @pytest.mark.parametrize("size", [8, 100_000])
    def test_one_winner_of_an_expired_key(self, exchange: Exchange, size: int) -> None:
        """The same content as before, and as the others': nothing in it tells old from new."""
        barrier = threading.Barrier(4)

        def contender(key: str) -> bool:
            barrier.wait()
            return exchange.put_if_absent(key, b"v" * size, lifetime_s=60) is not None

        keys = [f"race/{race}" for race in range(4)]
        for key in keys:
            assert exchange.put_if_absent(key, b"v" * size, lifetime_s=self.lifetime_s) is not None
        for key in keys:
            until(lambda key=key: not exchange.wait(key, 0))  # type: ignore[misc]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for key in keys:
                assert list(pool.map(contender, [key] * 4)).count(True) == 1
                assert exchange.get(key) == b"v" * size

    # -- lifetimes

    @pytest.mark.parametrize("size", [8, 100_000])
    def test_an_expired_value_is_as_absent(self, exchange: Exchange, size: int) -> None:
        short = exchange.put("a/short", b"v" * size, lifetime_s=self.lifetime_s)
        exchange.put("a/long", b"v" * size, lifetime_s=600)
        exchange.put("a/kept", b"v" * size, lifetime_s=self.lifetime_s)
        exchange.put("a/kept", b"w" * size)
        until(lambda: not exchange.wait("a/short", 0))
        for key in (short, "a/short"):
            with pytest.raises(NotFound, match="a/short"):
                exchange.get(key)
        with pytest.raises(NotFound, match="a/short"):
            exchange.get("a/short", start=1, length=2)
        assert not exchange.wait("a/short", 0)
        assert exchange.list("a/") == ["a/kept", "a/long"]
        assert exchange.get("a/kept") == b"w" * size
        assert exchange.put_if_absent("a/long", b"") is None
        assert exchange.put_if_absent("a/short", b"new") is not None
        assert exchange.get("a/short") == b"new"
        assert exchange.delete("a/") == 3

    def test_a_lifetime_is_positive(self, exchange: Exchange) -> None:
        for lifetime_s in (0.0, -1.0, float("nan"), float("inf")):
            for put in (exchange.put, exchange.put_if_absent):
                with pytest.raises(ValueError, match="k: lifetime_s"):
                    put("k", b"", lifetime_s=lifetime_s)
        assert exchange.list("") == []

    # -- waiting

    @pytest.mark.parametrize("size", [0, 100_000])
    @pytest.mark.parametrize("conditional", [False, True])
    def test_wait_wakes_when_the_value_is_there(self, exchange: Exchange, size: int, conditional: bool) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(exchange.wait, "w/k", 60.0)
            assert not exchange.wait("w/k", 0.1)
            assert not waiting.done()
            (exchange.put_if_absent if conditional else exchange.put)("w/k", b"v" * size)
            assert waiting.result(timeout=100)
        assert exchange.wait("w/k", 0)

    def test_wait_gives_up(self, exchange: Exchange) -> None:
        exchange.put("w/kk", b"")
        assert not exchange.wait("w/k", 0.1)
        assert not exchange.wait("w/k", 0)

    # -- the store goes away

    def test_durable_is_an_exchange_that_keeps_values(self, exchange: Exchange) -> None:
        ref = exchange.durable.put_if_absent("journal/1", b"{}")
        assert ref is not None
        assert exchange.durable.put_if_absent("journal/1", b"[]") is None
        assert exchange.durable.get(ref) == exchange.get("journal/1") == b"{}"
        assert exchange.list("journal/") == ["journal/1"]
        assert exchange.durable.durable is exchange.durable

    def test_unavailable_when_the_store_is_away(self, dying: Backend, job: str) -> None:
        exchange = open_exchange(dying.url, job)
        exchange.put("k", b"v")
        dying.stop()
        for method in (
            lambda: exchange.put("k", b""),
            lambda: exchange.put("k", b"v" * 100_000),
            lambda: exchange.put_if_absent("k2", b""),
            lambda: exchange.put_if_absent("k2", b"v" * 100_000),
            lambda: exchange.get("k"),
            lambda: exchange.get("k", start=0, length=1),
            lambda: exchange.list(""),
            lambda: exchange.wait("k2", 5),
            lambda: exchange.delete(""),
        ):
            with pytest.raises(Unavailable) as caught:
                method()
            assert "\n" not in str(caught.value)
