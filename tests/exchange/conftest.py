"""Servers for the exchanges' tests: one of each for the session; `fresh_` ones for tests that stop them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.exchange.servers import MotoServer, RadosGateway, RedisServer, S3Server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def fresh_redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    server = MotoServer(tmp_path_factory.mktemp("moto"))
    try:
        server.start().make_bucket("bucket")
        yield server
    finally:
        server.stop()


@pytest.fixture
def fresh_moto(tmp_path: Path) -> Iterator[MotoServer]:
    folder = tmp_path / "moto"
    folder.mkdir()
    server = MotoServer(folder)
    try:
        server.start().make_bucket("bucket")
        yield server
    finally:
        server.stop()


def gateway(folder: Path, *, sts: bool) -> Iterator[RadosGateway]:
    if RadosGateway.missing():
        pytest.skip(f"not installed: {', '.join(RadosGateway.missing())}")
    server = RadosGateway(folder, sts=sts)
    try:
        server.start().make_bucket("bucket")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def rados_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    yield from gateway(tmp_path_factory.mktemp("rados"), sts=False)


@pytest.fixture(scope="session")
def sts_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    yield from gateway(tmp_path_factory.mktemp("sts"), sts=True)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], None]:
    """Puts a server's credentials into the environment, where boto3 looks."""

    def use(server: S3Server) -> None:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)

    return use
