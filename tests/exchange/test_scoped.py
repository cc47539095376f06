"""One job's own credentials: all that an exchange does works with them, and nothing beyond the job's keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from functions.exchange.base import Exchange, Unavailable, Unsuitable
from functions.exchange.open import open_exchange
from functions.exchange.redis import RedisExchange
from functions.exchange.s3 import S3Exchange
from functions.exchange.scoped import RedisUsers, runs_root, s3_credentials
from functions.exchange.tiered import TieredExchange
from orchestrator.api.stores import s3_files
from tests.exchange.conformance import Backend, Conformance, noise
from tests.exchange.servers import MotoServer, RadosGateway, RedisServer, S3Server
from tests.exchange.test_redis import RawRedis
from tests.exchange.test_s3 import url
from tests.exchange.test_tiered import RawTiers

PASSWORD = "a-job's-own"
Credentials = Callable[[S3Server], None]


def use_redis(server: RedisServer, job: str, monkeypatch: pytest.MonkeyPatch) -> RedisUsers:
    """From here on this process is the job, for Redis."""
    for name in ("REDIS_USERNAME", "REDIS_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    users = RedisUsers(server.url, "here")
    users.grant(job, PASSWORD)
    monkeypatch.setenv("REDIS_USERNAME", f"rlhf:here:{job}")
    monkeypatch.setenv("REDIS_PASSWORD", PASSWORD)
    return users


def use_s3(place: str, job: str, role: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for S3, by the files of its Secret."""
    files = s3_files(s3_credentials(place, job, role), str(folder))
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", files["AWS_CONFIG_FILE"])


def trespasses(there: Exchange) -> dict[str, Callable[[], object]]:
    """What a job tries at the place of another, which has `k`."""
    return {
        "get": lambda: there.get("k"),
        "part": lambda: there.get("k", start=1, length=1),
        "put": lambda: there.put("k", b"mine"),
        "large": lambda: there.put("k", noise(100_000)),
        "new": lambda: there.put("new", b"mine"),
        "put_if_absent": lambda: there.put_if_absent("new", b"mine"),
        "large_if_absent": lambda: there.put_if_absent("new", noise(100_000)),
        "delete": lambda: there.delete(""),
        "exists": lambda: there.wait("k", 0),
    }


class Scoped(Conformance):
    """What dies is a Redis, used by the job's own credentials."""

    @pytest.fixture
    def dying(self, fresh_redis: RedisServer, job: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        raw = RawRedis(fresh_redis)
        use_redis(fresh_redis, job, monkeypatch)
        yield Backend(fresh_redis.url, raw, fresh_redis.stop)
        raw.client.close()


class TestScopedRedis(Scoped):
    @pytest.fixture
    def backend(self, redis_server: RedisServer, job: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        raw = RawRedis(redis_server)
        users = use_redis(redis_server, job, monkeypatch)
        yield Backend(redis_server.url, raw)
        users.revoke(job)
        raw.client.close()

    def test_jobs_do_not_see_each_other(self, backend: Backend, exchange: Exchange, job: str) -> None:
        other = f"{job}-other"
        assert isinstance(backend.raw, RawRedis)
        backend.raw.client.set(f"rlhf/{other}/k", b"theirs")
        there = open_exchange(backend.url, other)
        for what, action in trespasses(there).items():
            with pytest.raises(Unsuitable, match=r"^[^\n]*refuses us: [^\n]*permission[^\n]*$"):
                print(what, action())
        assert isinstance(exchange, RedisExchange)
        commands = ["KEYS *", "FLUSHALL", "CONFIG GET *", "ACL LIST", "ACL SETUSER x", "PUBSUB CHANNELS", "INFO"]
        for command in (*commands, f"PUBLISH rlhf/{other}/k x", f"SUBSCRIBE rlhf/{other}/k", f"COPY rlhf/{other}/k k"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                print(command, exchange.client.execute_command(*command.split()))  # type: ignore[no-untyped-call]
        script = f"return redis.call('GET', 'rlhf/{other}/k')"
        with pytest.raises(redis.exceptions.ResponseError, match=r"can't access|permission"):
            exchange.client.eval(script, 0)
        assert there.list("") == ["k"], "names alone are not divided: an ACL has no patterns for SCAN"
        assert backend.raw.client.get(f"rlhf/{other}/k") == b"theirs"


def test_a_job_writes_its_own_run_and_reads_its_own_bundles(
    fresh_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = open_exchange(fresh_redis.url, runs_root("#release"))
    for key in ("run/job-1/log", "files/mine/log", "files/theirs/log", "api/log"):
        admin.put(key, noise(100_000))
    users = use_redis(fresh_redis, "job", monkeypatch)
    users.grant("job", PASSWORD, "#release", ["mine"])
    runs = open_exchange(fresh_redis.url, runs_root("#release"))
    runs.put_if_absent("run/job/log", noise(100_000))
    assert runs.get("run/job/log") == runs.get("files/mine/log") == noise(100_000)
    for key in ("run/job-1/log", "files/theirs/log", "api/log"):
        with pytest.raises(Unsuitable, match="refuses us"):
            runs.get(key)
    divides = int(users.client.info()["redis_version"].split(".")[0]) >= 7
    for key in ("run/job-1/log", *(["files/mine/log"] if divides else []), "files/theirs/log", "api/log"):
        for write in (runs.put, runs.put_if_absent):
            with pytest.raises(Unsuitable, match="refuses us"):
                write(f"{key}.new", b"x")
        with pytest.raises(Unsuitable, match="refuses us"):
            runs.delete(key)


def test_a_user_that_redis_lost_is_waited_for_and_one_that_ended_is_gone(
    fresh_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = use_redis(fresh_redis, "job", monkeypatch)
    exchange = open_exchange(fresh_redis.url, "job")
    users.grant("job", PASSWORD)
    exchange.put("k", b"v")
    fresh_redis.stop()
    fresh_redis.start()
    assert users.known() == set()
    with pytest.raises(Unavailable, match="has lost our user, which the job API makes again"):
        exchange.put("k", b"v")
    users.grant("job", PASSWORD)
    exchange.put("k", b"v")
    RedisUsers.grant(users, "job-2", PASSWORD)
    assert users.known() == {"job", "job-2"}
    users.revoke("job")
    with pytest.raises(Unavailable):
        exchange.get("k")
    assert users.known() == {"job-2"}


def test_releases_on_one_redis_know_their_own_users(redis_server: RedisServer) -> None:
    here, there = RedisUsers(redis_server.url, "here"), RedisUsers(redis_server.url, "there")
    here.grant("a", PASSWORD)
    there.grant("b", PASSWORD)
    assert (here.known(), there.known()) == ({"a"}, {"b"})
    here.revoke("a")
    there.revoke("b")


def test_credentials_of_s3_come_from_a_process_and_are_asked_for_again(
    moto_server: MotoServer, credentials: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto refuses nobody: what is seen here is how they come, and that they are renewed and waited for."""
    credentials(moto_server)
    use_s3(url(moto_server), "job", "arn:aws:iam::123456789012:role/jobs", tmp_path / "stores", monkeypatch)
    exchange = open_exchange(url(moto_server), "job")
    assert isinstance(exchange, S3Exchange)
    exchange.put("k", b"v")
    own = exchange.client._request_signer._credentials
    first = own.access_key
    assert own.method == "custom-process"
    assert own.refresh_needed() is False
    file = tmp_path / "stores" / "AWS_STORES_CREDENTIALS"
    written = file.read_text()
    own._expiry_time = own._time_fetcher()  # it is an hour later
    file.write_text(written.replace(first, "renewed"))
    exchange.get("k")
    assert own.access_key == "renewed"
    own._expiry_time = own._time_fetcher()
    year = written.index('"Expiration": "') + len('"Expiration": "')
    file.write_text(written[:year] + "2001" + written[year + 4 :])
    with pytest.raises(Unavailable, match=r"k: our credentials of .* have expired, and are not renewed yet"):
        exchange.get("k")


@pytest.fixture(scope="module")
def role(sts_gateway: RadosGateway) -> str:
    return sts_gateway.make_role("jobs")


@pytest.mark.radosgw
class TestScopedTiers(Scoped):
    """A Redis and Ceph's gateway, both by the job's own credentials."""

    @pytest.fixture
    def backend(
        self, sts_gateway: RadosGateway, redis_server: RedisServer, role: str, credentials: Credentials, job: str,
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[Backend]:  # fmt: skip
        credentials(sts_gateway)
        place = f"tiered+{url(sts_gateway)}&redis={redis_server.url}"
        raw = RawTiers(redis_server, sts_gateway)
        users = use_redis(redis_server, job, monkeypatch)
        use_s3(place, job, role, tmp_path / "stores", monkeypatch)
        yield Backend(place, raw)
        users.revoke(job)
        raw.close()

    def test_jobs_do_not_see_each_other(self, backend: Backend, exchange: Exchange, job: str) -> None:
        assert "AWS_SECRET_ACCESS_KEY" not in os.environ
        other = f"{job}-other"
        assert isinstance(backend.raw, RawTiers)
        client = backend.raw.s3.client
        client.put_object(Bucket="bucket", Key=f"tests/{other}/k", Body=b"theirs")
        there = open_exchange(backend.url, other)
        assert isinstance(there, TieredExchange)
        assert isinstance(exchange, TieredExchange)
        for what, action in (trespasses(there.s3) | {"list": lambda: there.s3.list("")}).items():
            with pytest.raises(Unsuitable, match=r"^[^\n]* refuses our credentials \((AccessDenied|403)\)[^\n]*$"):
                print(what, action())
        for what, action in trespasses(there).items():
            with pytest.raises(Unsuitable, match=r"refuses (us|our credentials)"):
                print(what, action())
        stored = client.get_object(Bucket="bucket", Key=f"tests/{other}/k")["Body"].read()
        assert stored == b"theirs"
        copy = {"Bucket": "bucket", "Key": f"tests/{job}/stolen", "CopySource": f"bucket/tests/{other}/k"}
        with pytest.raises(Exception, match="AccessDenied"):
            exchange.s3.client.copy_object(**copy)
        runs = open_exchange(backend.url, runs_root("")).durable
        assert runs.put_if_absent(f"run/{job}/log", b"mine") is not None
        assert (runs.get(f"run/{job}/log"), runs.list(f"run/{job}/")) == (b"mine", [f"run/{job}/log"])
        for key in ("api/log", f"run/{other}/log", "files/theirs/log"):
            client.put_object(Bucket="bucket", Key=f"tests/{runs_root('')}/{key}", Body=b"theirs")
            for action in (lambda key=key: runs.get(key), lambda key=key: runs.put(key, b"x")):
                with pytest.raises(Unsuitable, match="refuses our credentials"):
                    action()
