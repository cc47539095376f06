"""Each job's own credentials: a Secret, a user of a real Redis, and credentials from a real STS, kept while it runs."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubernetes
import pytest
import redis

from functions.base.wire import Json
from functions.exchange.base import Unsuitable
from functions.exchange.open import open_exchange
from orchestrator.api.launch_kubernetes import KubernetesLauncher
from orchestrator.api.stores import JobStores
from orchestrator.job.config import parse_job
from orchestrator.platforms.knative.api import KubeApi
from orchestrator.run.directory import RunDirectory
from tests.api.conftest import JOB
from tests.api.test_kubernetes import TEMPLATE, Cluster, cluster  # noqa: F401  # a fixture
from tests.exchange.conftest import credentials, fresh_redis, moto_server  # noqa: F401  # fixtures
from tests.exchange.servers import MotoServer, RedisServer
from tests.support.kubeconfig import kubeconfig

ROLE = "arn:aws:iam::123456789012:role/jobs"
Made = Callable[..., KubernetesLauncher]


@pytest.fixture
def server(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:  # noqa: F811
    """Makes an API server's launcher; a second one is the server that takes the first one's place."""
    for name in [name for name in os.environ if name.startswith(("REDIS_", "AWS_"))]:
        monkeypatch.delenv(name)
    address = f"http://127.0.0.1:{cluster.server_address[1]}"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, address)))
    clients = []

    def made(url: str, role: str = "") -> KubernetesLauncher:
        clients.append(kubernetes.client.ApiClient(kubernetes.client.Configuration(host=address)))
        stores = JobStores(KubeApi(), "rl", tmp_path / "runs", url, "release", role)
        batch = kubernetes.client.BatchV1Api(clients[-1])
        return KubernetesLauncher(tmp_path / "runs", TEMPLATE, "rl", batch, url, "stores", stores)

    yield made
    for client in clients:
        client.close()  # type: ignore[no-untyped-call]


def submitted(runs: Path, name: str, url: str) -> None:
    (runs / name).mkdir(parents=True)
    job = parse_job(JOB | {"name": name, "exchange": {"url": url}}, base=Path("/"))
    RunDirectory.create(runs / name, job)


def secret(cluster: Cluster, job: str) -> dict[str, str]:  # noqa: F811
    found = cluster.secrets[f"{job}-stores"]["data"]
    return {name: base64.b64decode(value).decode() for name, value in found.items()}


def ended(cluster: Cluster, launch: str) -> None:  # noqa: F811
    cluster.jobs[launch]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}


def use(held: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in held.items():
        monkeypatch.setenv(name, value)


def test_a_job_has_its_own_user_for_as_long_as_it_has_a_runner(
    server: Made, cluster: Cluster, fresh_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    launcher, admin = server(fresh_redis.url), redis.Redis.from_url(fresh_redis.url)
    for name in "ab":
        submitted(tmp_path / "runs", name, fresh_redis.url)
        launcher.start(name, 1)
    launcher.keep()
    owner: Json = {"apiVersion": "batch/v1", "kind": "Job", "name": "a-1", "uid": "uid-a-1"}
    assert cluster.secrets["a-stores"]["metadata"]["ownerReferences"] == [owner], "it goes with the launch"
    held = secret(cluster, "a")
    assert held.keys() == {"REDIS_USERNAME", "REDIS_PASSWORD"}
    assert held["REDIS_PASSWORD"] != secret(cluster, "b")["REDIS_PASSWORD"]

    fresh_redis.stop()  # and it forgets its users
    fresh_redis.start()
    server(fresh_redis.url).keep()  # of a server that knows nothing of the one before
    assert secret(cluster, "a") == held, "its functions hold it"
    with monkeypatch.context() as as_a:
        use(held, as_a)
        open_exchange(fresh_redis.url, "a").put("k", b"v")
        with pytest.raises(Unsuitable, match="refuses us"):
            open_exchange(fresh_redis.url, "b").put("k", b"v")

    ended(cluster, "a-1")
    launcher.keep()
    assert admin.acl_users() == ["default", "rlhf:release:b"]
    launcher.start("a", 2)
    launcher.keep()
    assert cluster.secrets["a-stores"]["metadata"]["ownerReferences"][0]["uid"] == "uid-a-2"
    assert "rlhf:release:a" in admin.acl_users()

    del cluster.secrets["b-stores"]  # it went with an earlier launch, and no server was there to remove the user
    server(fresh_redis.url).keep()
    with monkeypatch.context() as as_b:
        use(secret(cluster, "b"), as_b)
        open_exchange(fresh_redis.url, "b").put("k", b"v")
    admin.close()


def test_two_servers_make_one_password(
    server: Made, cluster: Cluster, fresh_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    servers = [server(fresh_redis.url) for _ in range(4)]
    names = [f"job-{number}" for number in range(5)]
    for name in names:
        submitted(tmp_path / "runs", name, fresh_redis.url)
        servers[0].start(name, 1)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(KubernetesLauncher.keep, servers))
    for name in names:
        with monkeypatch.context() as as_job:
            use(secret(cluster, name), as_job)
            open_exchange(fresh_redis.url, name).put("k", b"v")


def test_a_redis_that_is_away_is_waited_for_and_said_once(
    server: Made, cluster: Cluster, fresh_redis: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:  # fmt: skip
    fresh_redis.stop()
    launcher = server(fresh_redis.url)
    submitted(tmp_path / "runs", "a", fresh_redis.url)
    launcher.start("a", 1)
    with caplog.at_level(logging.WARNING, "orchestrator.api.stores"):
        launcher.keep()
        launcher.keep()
    assert cluster.secrets == {}
    assert len([line for line in caplog.messages if line.startswith("Redis: ")]) == 1
    fresh_redis.start()
    launcher.keep()
    assert secret(cluster, "a")["REDIS_USERNAME"] == "rlhf:release:a"


def test_a_redis_that_makes_no_users_has_the_releases_credentials(
    server: Made, cluster: Cluster, fresh_redis: RedisServer, tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    redis.Redis.from_url(fresh_redis.url).acl_setuser("release", True, passwords=["+it"], keys="*", channels="*",
                                                      categories=["+@all"], commands=["-acl"])  # fmt: skip
    released = {"REDIS_USERNAME": "release", "REDIS_PASSWORD": "it"}
    use(released, monkeypatch)
    launcher = server(fresh_redis.url)
    submitted(tmp_path / "runs", "a", fresh_redis.url)
    launcher.start("a", 1)
    with caplog.at_level(logging.WARNING, "orchestrator.api.stores"):
        launcher.keep()
        launcher.keep()
    assert secret(cluster, "a") == released
    [line] = caplog.messages
    assert line.startswith("Redis: all jobs have the release's credentials")


def test_with_a_role_a_job_has_credentials_of_its_prefix_and_they_are_renewed(
    server: Made, cluster: Cluster, moto_server: MotoServer, credentials: Callable[[MotoServer], None],  # noqa: F811
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    url = f"s3://bucket/jobs?endpoint={moto_server.endpoint}"
    credentials(moto_server)
    with caplog.at_level(logging.WARNING, "orchestrator.api.stores"):
        shared, launcher = server(url), server(url, ROLE)
    assert caplog.messages == [
        "S3: all jobs have the release's credentials; exchange.role of the chart gives each its own"
    ]
    submitted(tmp_path / "runs", "a", url)
    launcher.start("a", 1)
    shared.keep()
    assert secret(cluster, "a")["AWS_SECRET_ACCESS_KEY"] == moto_server.secret_key
    launcher.keep()
    held = secret(cluster, "a")
    assert not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} & held.keys(), "botocore would take them first"
    made = json.loads(held["AWS_STORES_CREDENTIALS"])
    assert made.keys() == {"Version", "AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"}
    assert held["AWS_CONFIG_FILE"] == "/run/rlhf-stores/AWS_STORES_CONFIG"
    launcher.keep()
    assert secret(cluster, "a") == held, "they live on"
    server(url, ROLE).keep()
    assert secret(cluster, "a")["AWS_STORES_CREDENTIALS"] != held["AWS_STORES_CREDENTIALS"]
