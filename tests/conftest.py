"""No test asserts on time: an example of hypothesis may take as long as the machine lets it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.exchange.servers import RedisServer

settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, that it may stop."""
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    try:
        yield server.start()
    finally:
        server.stop()
