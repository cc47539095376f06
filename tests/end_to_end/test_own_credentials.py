"""A whole job by a Redis user of its own (orchestrator/api/stores.py makes it on a cluster): no right is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from functions.exchange.scoped import RedisUsers
from tests.exchange.servers import RedisServer
from tests.support.tiny_job import ENV, command, make_job

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", "--requirepass", "the-releases")
    try:
        yield server.start()
    finally:
        server.stop()


def test_a_job_runs_by_its_own_user_and_another_job_may_not(
    guarded: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as as_release:
        as_release.setenv("REDIS_PASSWORD", "the-releases")
        RedisUsers(guarded.url, "here").grant("tiny", "own")
    for name, value in {"REDIS_USERNAME": "rlhf:here:tiny", "REDIS_PASSWORD": "own"}.items():
        monkeypatch.setitem(ENV, name, value)
    job = make_job(tmp_path / "data", steps=1)
    done = command("run", job.file, "--run-dir", tmp_path / "run", f"exchange.url={guarded.url}")
    assert done.returncode == 0, done.stdout + done.stderr
    admin = redis.Redis(port=guarded.port, password="the-releases")
    assert {bytes(name).split(b"/")[1] for name in admin.scan_iter()} == {b"tiny"}
    admin.close()
    other = command("run", job.file, "--run-dir", tmp_path / "other", f"exchange.url={guarded.url}", "name=other")
    assert other.returncode != 0
    assert "refuses us: " in (said := (other.stdout + other.stderr).strip().splitlines()[-1]), said
    assert "permissions" in said
