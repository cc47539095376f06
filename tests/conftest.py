"""No test asserts on time: an example of hypothesis may take as long as the machine lets it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from functions.sandbox.local import LocalSandbox
from functions.sandbox.program import SandboxError
from tests.exchange.servers import RedisServer
from tests.sandbox.contained import contained

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


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    """Under limits that are not its own."""
    try:
        made = LocalSandbox()
    except SandboxError as error:
        pytest.skip(f"no sandbox on this machine: {error}")
    with contained(made._server.pid):
        try:
            yield made
        finally:
            made.close()
