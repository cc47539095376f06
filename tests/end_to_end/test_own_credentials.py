"""Whole jobs by credentials of their own (orchestrator/api/stores.py makes them on a cluster): no right is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from functions.exchange.scoped import RedisUsers, s3_credentials
from orchestrator.api.stores import s3_files
from tests.exchange.conftest import credentials, sts_gateway  # noqa: F401  # fixtures
from tests.exchange.servers import RadosGateway, RedisServer
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


def use_redis(guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as as_release:
        as_release.setenv("REDIS_PASSWORD", "the-releases")
        RedisUsers(guarded.url, "here").grant("tiny", "own")
    for name, value in {"REDIS_USERNAME": "rlhf:here:tiny", "REDIS_PASSWORD": "own"}.items():
        monkeypatch.setitem(ENV, name, value)


def test_a_job_runs_by_its_own_user_and_another_job_may_not(
    guarded: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_redis(guarded, monkeypatch)
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


@pytest.mark.radosgw
def test_a_job_runs_by_credentials_of_its_prefix_and_another_job_may_not(
    guarded: RedisServer, sts_gateway: RadosGateway, credentials: Callable[[RadosGateway], None],  # noqa: F811
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    exchange = f"tiered+s3://bucket/jobs?endpoint={sts_gateway.endpoint}&redis={guarded.url}"
    credentials(sts_gateway)
    files = s3_files(s3_credentials(exchange, "tiny", sts_gateway.make_role("tiny")), str(tmp_path / "stores"))
    (tmp_path / "stores").mkdir()
    for name, text in files.items():
        (tmp_path / "stores" / name).write_text(text)
    use_redis(guarded, monkeypatch)
    environment = {name: value for name, value in sts_gateway.environment.items() if "ACCESS_KEY" not in name}
    for name, value in (environment | {"AWS_CONFIG_FILE": files["AWS_CONFIG_FILE"]}).items():
        monkeypatch.setitem(ENV, name, value)
    job = make_job(tmp_path / "data", steps=1)
    done = command("run", job.file, "--run-dir", tmp_path / "run", f"exchange.url={exchange}")
    assert done.returncode == 0, done.stdout + done.stderr
    other = command("run", job.file, "--run-dir", tmp_path / "other", f"exchange.url={exchange}", "name=other")
    assert other.returncode != 0
    assert "refuses " in (other.stdout + other.stderr).strip().splitlines()[-1]
