"""Throughput of the exchanges against what lies beneath them, on the same store, alternating in one run.

    directory   against a plain file: open, write, close; open, read, close          target: at least 0.5 of its speed
    redis       against redis-py's SET and GET with its defaults                     target: at least 0.8
    s3          against boto3's put_object and get_object with its defaults          target: at least 0.8

    python bench/exchange.py [--sizes 1 16 256] [--seconds 4] [--only directory redis moto radosgw]

Each round does one operation of ours and one of the bare client's, in turns; a figure is the ratio of the medians of
their times. Servers are started here and stopped at the end: radosgw where Ceph is installed, else moto.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import redis

from functions.exchange.base import Exchange
from functions.exchange.open import open_exchange
from tests.exchange.servers import MotoServer, RadosGateway, RedisServer, S3Server

MB = 1 << 20
TARGETS = {"directory": 0.5, "redis": 0.8, "redis unix": 0.8, "moto": 0.8, "radosgw": 0.8}


@dataclass(frozen=True)
class Pair:
    """An exchange and the bare client of the same store."""

    exchange: Exchange
    bare_put: Callable[[bytes], object]
    bare_get: Callable[[], bytes]


@dataclass(frozen=True)
class Row:
    store: str
    size_mb: int
    operation: str
    ours_mb_s: float
    bare_mb_s: float
    rounds: int

    @property
    def ratio(self) -> float:
        return self.ours_mb_s / self.bare_mb_s


def timed(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def compare(store: str, size_mb: int, pair: Pair, seconds: float) -> Iterator[Row]:
    data = os.urandom(size_mb * MB)
    ref = pair.exchange.put("value", data)
    pair.bare_put(data)
    assert pair.exchange.get(ref) == data == pair.bare_get()
    for name, ours, bare in (
        ("put", lambda: pair.exchange.put("value", data), lambda: pair.bare_put(data)),
        ("get", lambda: pair.exchange.get(ref), pair.bare_get),
    ):
        times: tuple[list[float], list[float]] = ([], [])
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[0]) < 5:
            first = len(times[0]) % 2
            for which in (first, 1 - first):
                times[which].append(timed((ours, bare)[which]))
        medians = [statistics.median(t) for t in times]
        yield Row(store, size_mb, name, size_mb / medians[0], size_mb / medians[1], len(times[0]))
    pair.exchange.delete("")


def directory_pair(folder: Path) -> Pair:
    plain = folder / "plain"

    def put(data: bytes) -> None:
        with plain.open("wb", buffering=0) as file:
            file.write(data)

    def get() -> bytes:
        with plain.open("rb", buffering=0) as file:
            return file.read()

    return Pair(open_exchange(str(folder / "exchange"), "bench"), put, get)


def redis_pair(url: str) -> Pair:
    client = redis.Redis.from_url(url)
    return Pair(open_exchange(url, "bench"), lambda data: client.set("bare", data), lambda: bytes(client.get("bare")))  # type: ignore[arg-type]


def s3_pair(server: S3Server) -> Pair:
    os.environ.update(server.environment)
    server.make_bucket("bench")
    client = boto3.client("s3", endpoint_url=server.endpoint)
    return Pair(
        open_exchange(f"s3://bench/exchange?endpoint={server.endpoint}", "bench"),
        lambda data: client.put_object(Bucket="bench", Key="bare", Body=data),
        lambda: client.get_object(Bucket="bench", Key="bare")["Body"].read(),
    )


@contextmanager
def pair_of(store: str) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if store == "directory":
            yield directory_pair(folder)
            return
        server: RedisServer | MotoServer | RadosGateway
        if store.startswith("redis"):
            server = RedisServer(folder)
        elif store == "moto":
            server = MotoServer(folder)
        else:
            server = RadosGateway(folder, osd_bytes=12 << 30)
        try:
            server.start()
            if isinstance(server, RedisServer):
                yield redis_pair(f"unix://{server.unix}" if store == "redis unix" else server.url)
            else:
                yield s3_pair(server)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 256], metavar="MB")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each operation and size")
    best_s3 = "moto" if RadosGateway.missing() else "radosgw"
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=["directory", "redis", "redis unix", best_s3])
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'store':12} {'MB':>4} {'':4} {'ours MB/s':>10} {'bare MB/s':>10} {'ratio':>6} {'target':>6} {'rounds':>6}")
    for store in options.only:
        with pair_of(store) as pair:
            for size_mb in options.sizes:
                for row in compare(store, size_mb, pair, options.seconds):
                    rows.append(row)
                    figures = f"{row.ours_mb_s:10.0f} {row.bare_mb_s:10.0f} {row.ratio:6.2f} {TARGETS[store]:6.1f}"
                    print(f"{store:12} {size_mb:4} {row.operation:4} {figures} {row.rounds:6}", flush=True)
    figures_of = {
        f"{row.store} {row.size_mb}MB {row.operation}": {
            "ours_mb_s": round(row.ours_mb_s, 1),
            "bare_mb_s": round(row.bare_mb_s, 1),
            "ratio": round(row.ratio, 3),
        }
        for row in rows
    }
    reached = all(row.ratio >= TARGETS[row.store] for row in rows)
    print(json.dumps({"bench": "exchange", "reached": reached, "figures": figures_of}))


if __name__ == "__main__":
    main()
