"""No test asserts on time: an example of hypothesis may take as long as the machine lets it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from functions.sandbox.local import LocalSandbox
from functions.sandbox.program import SandboxError
from functions.server.forkserver_client import FORKSERVER
from tests.exchange.servers import RedisServer
from tests.sandbox.contained import contained
from tests.support import forked
from tests.support.tiny_job import ENV

gc.disable()  # what is imported to collect the tests is no garbage
settings.register_profile("same", deadline=None, derandomize=True)  # what lands does not hang on luck
settings.load_profile("same")
settings.register_profile("search", deadline=None)
"""Examples that nobody has seen: `pytest --hypothesis-profile search`."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The folder of a tier that is not asked for is not imported either; vLLM's has default tests too."""
    tier = collection_path.name
    return True if tier in ("browser", "cluster") and f"not {tier}" in config.getoption("markexpr") else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forkserver() -> Iterator[None]:
    """Jobs and platforms of a worker's tests have their node agents forked from one process."""
    os.environ["PYTHONPATH"] = ENV["PYTHONPATH"] = str(Path(__file__).parents[1])  # as jobs elsewhere have it
    with forked.forkserver(ENV) as path:
        os.environ[FORKSERVER] = ENV[FORKSERVER] = path
        yield
        del os.environ[FORKSERVER], ENV[FORKSERVER]


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
