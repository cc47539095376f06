"""The exchange in S3: the conformance suite against moto's server and Ceph's, and what only S3 can suffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from functions.exchange.base import Corrupt, Full, NotFound, Unavailable, Unsuitable, checksum
from functions.exchange.open import open_exchange
from functions.exchange.s3 import S3Exchange
from tests.exchange.conformance import Backend, Conformance, noise
from tests.exchange.servers import LOOPBACK, BadS3, LosesAnswers, MotoServer, RadosGateway, S3Server
from tests.support.waiting import until

Credentials = Callable[[S3Server], None]
Opened = Callable[[type[S3Exchange]], S3Exchange]


def bare_client(server: S3Server) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )


class RawS3:
    """Objects with their metadata kept: what a careless copy, or a bad disk, would do."""

    def __init__(self, server: S3Server) -> None:
        self.client = bare_client(server)

    def read(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket="bucket", Key=f"tests/{key}")["Body"].read())

    def write(self, key: str, stored: bytes) -> None:
        metadata = self.client.head_object(Bucket="bucket", Key=f"tests/{key}")["Metadata"]
        self.client.put_object(Bucket="bucket", Key=f"tests/{key}", Body=stored, Metadata=metadata)


def url(server: S3Server) -> str:
    return f"s3://bucket/tests?endpoint={server.endpoint}"


def backend_of(server: S3Server) -> Iterator[Backend]:
    raw = RawS3(server)
    yield Backend(url(server), raw, server.stop)
    raw.client.close()


class TestS3(Conformance):
    """moto: pure Python, slow."""

    @pytest.fixture
    def backend(self, moto_server: MotoServer, credentials: Credentials) -> Iterator[Backend]:
        credentials(moto_server)
        yield from backend_of(moto_server)

    @pytest.fixture
    def dying(self, fresh_moto: MotoServer, credentials: Credentials) -> Iterator[Backend]:
        credentials(fresh_moto)
        yield from backend_of(fresh_moto)


@pytest.mark.radosgw
class TestRadosGateway(Conformance):
    @pytest.fixture
    def backend(self, rados_gateway: RadosGateway, credentials: Credentials) -> Iterator[Backend]:
        credentials(rados_gateway)
        yield from backend_of(rados_gateway)

    @pytest.fixture
    def dying(self, fresh_moto: MotoServer, credentials: Credentials) -> Iterator[Backend]:
        credentials(fresh_moto)
        yield from backend_of(fresh_moto)

    def test_a_wrong_secret_gets_one_line(
        self, rados_gateway: RadosGateway, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        credentials(rados_gateway)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(Unsuitable, match=r"refuses our credentials \(SignatureDoesNotMatch\)"):
            open_exchange(url(rados_gateway), "job")


@pytest.fixture
def opened(
    moto_server: MotoServer, credentials: Credentials, request: pytest.FixtureRequest
) -> Callable[[type[S3Exchange]], S3Exchange]:
    """An exchange of the test's own, of a class that may have other limits."""
    credentials(moto_server)
    return lambda kind: kind("bucket", "own/", request.node.name[:60], endpoint=moto_server.endpoint)


@pytest.fixture
def exchange(opened: Opened) -> S3Exchange:
    return opened(S3Exchange)


def stored_keys(exchange: S3Exchange) -> list[str]:
    entries = exchange.client.list_objects_v2(Bucket="bucket", Prefix=exchange.root).get("Contents", [])
    return [entry["Key"][len(exchange.root) :] for entry in entries]


class InParts(S3Exchange):
    multipart_bytes = 6 << 20
    part_bytes = 5 << 20


class InSmallParts(InParts):
    part_bytes = 1 << 20  # S3 wants 5 MB a part: refused when they are joined


class SweepsAtOnce(S3Exchange):
    sweep_every_s = sweep_grace_s = 0.0


def test_large_values_go_up_in_parts(opened: Opened) -> None:
    exchange = opened(InParts)
    data = noise(11 << 20)
    ref = exchange.put("k", [data[:1], data[1 : 7 << 20], data[7 << 20 :]], lifetime_s=60)
    assert ref.checksum == checksum(data)
    assert exchange.get(ref) == data
    assert exchange.client.head_object(Bucket="bucket", Key=f"{exchange.root}k")["ETag"].endswith('-3"')


def test_a_failed_part_leaves_no_upload_and_no_value(opened: Opened) -> None:
    exchange = opened(InSmallParts)
    with pytest.raises(Exception, match="EntityTooSmall"):
        exchange.put("k", noise(7 << 20))
    assert exchange.list("") == []
    assert "Uploads" not in exchange.client.list_multipart_uploads(Bucket="bucket", Prefix=exchange.root)


def test_an_object_of_somebody_else_is_refused(exchange: S3Exchange) -> None:
    exchange.client.put_object(Bucket="bucket", Key=f"{exchange.root}k", Body=b"by hand")
    with pytest.raises(Corrupt, match="k: the object was not written by an exchange"):
        exchange.get("k")
    assert exchange.put_if_absent("k", b"") is None


def test_the_sweep_removes_what_expired_and_nothing_else(opened: Opened) -> None:
    class SweepsWhenTold(S3Exchange):
        sweep_grace_s = 0.0

    exchange = opened(SweepsWhenTold)
    exchange.put("gone", b"v", lifetime_s=0.2)
    exchange.put("kept", b"v", lifetime_s=0.2)
    exchange.put("kept", b"v")
    exchange.put("longer", b"v", lifetime_s=0.2)
    exchange.put("longer", b"v", lifetime_s=600)
    exchange.put("last", b"v", lifetime_s=0.2)
    until(lambda: not exchange.wait("last", 0))  # and so the others, which were to end before it
    assert exchange.sweep(limit=0) == 0
    assert exchange.sweep() == 2
    keys = stored_keys(exchange)
    assert [key for key in keys if not key.startswith("+")] == ["kept", "longer"]
    assert len(keys) == 3
    assert keys[0].startswith("+expires/longer@")
    assert exchange.delete("") == 2
    assert stored_keys(exchange) == []


def test_a_put_sweeps_now_and_then(opened: Opened) -> None:
    exchange = opened(SweepsAtOnce)
    exchange.put("gone", b"v", lifetime_s=0.01)
    until(lambda: not exchange.wait("gone", 0))
    exchange.put("new", b"v", lifetime_s=600)
    assert [key for key in stored_keys(exchange) if not key.startswith("+")] == ["new"]


def test_a_winner_whose_answer_was_lost_still_knows(moto_server: MotoServer, credentials: Credentials) -> None:
    """boto3 repeats a put whose answer it did not get; the repetition finds our own object there."""
    credentials(moto_server)
    relay = LosesAnswers(moto_server.port)
    try:
        exchange = S3Exchange("bucket", "own/", "lost", endpoint=f"http://{LOOPBACK}:{relay.port}")
        relay.armed.set()
        assert exchange.put_if_absent("k", b"v") is not None
        assert not relay.armed.is_set()
        assert exchange.put_if_absent("k", b"v") is None
    finally:
        relay.stop()


@pytest.mark.parametrize(
    ("how", "message"), [("refuses", r"refuses conditional puts .*tiered"), ("ignores", "silently ignores conditional")]
)
def test_a_store_with_bad_conditional_puts_is_refused(
    moto_server: MotoServer, credentials: Credentials, how: Any, message: str
) -> None:
    credentials(moto_server)
    proxy = BadS3(moto_server, how).start()
    try:
        with pytest.raises(Unsuitable, match=message):
            open_exchange(f"s3://bucket/bad-{how}?endpoint={proxy.endpoint}", "job")
    finally:
        proxy.stop()


def test_a_full_store_is_told_from_one_that_is_away(moto_server: MotoServer, credentials: Credentials) -> None:
    """At its opening; and so that the line says what can be deleted."""
    credentials(moto_server)
    proxy = BadS3(moto_server, "full").start()
    try:
        with pytest.raises(
            Full, match=r"full \(XMinioStorageFull\); nothing was written: make room by deleting"
        ) as caught:
            open_exchange(f"s3://bucket/full?endpoint={proxy.endpoint}", "job")
        assert caught.value.store == f"s3://bucket/full/ at {proxy.endpoint}"
    finally:
        proxy.stop()


def test_what_is_absent_and_hidden_is_absent(moto_server: MotoServer, credentials: Credentials) -> None:
    """AWS answers 403, not 404, to who may list its own prefix alone."""
    credentials(moto_server)
    proxy = BadS3(moto_server, "hides").start()
    try:
        exchange = open_exchange(f"s3://bucket/hides?endpoint={proxy.endpoint}", "job")
        exchange.put("k1", b"v")
        assert not exchange.wait("k", 0)
        with pytest.raises(NotFound, match="k: no such value"):
            exchange.get("k")
        assert exchange.put_if_absent("k", b"w") is not None
        assert exchange.get("k") == b"w"
        exchange.delete("")
    finally:
        proxy.stop()


def conditional_put(client: Any) -> int:
    """The HTTP status of one on a key that exists."""
    try:
        answer = client.put_object(Bucket="bucket", Key="plain", Body=b"w", IfNoneMatch="*")
    except ClientError as error:
        answer = error.response
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def test_the_bad_stores_are_as_bad_as_they_say(moto_server: MotoServer, credentials: Credentials) -> None:
    """And good otherwise: what is refused above is refused for the conditional put alone."""
    credentials(moto_server)
    for how, second in (("refuses", 501), ("ignores", 200)):
        proxy = BadS3(moto_server, how).start()  # type: ignore[arg-type]
        try:
            client = boto3.client("s3", endpoint_url=proxy.endpoint)
            client.put_object(Bucket="bucket", Key="plain", Body=b"v")
            assert client.get_object(Bucket="bucket", Key="plain")["Body"].read() == b"v"
            assert conditional_put(client) == second
            client.close()
        finally:
            proxy.stop()


def test_bad_places_get_one_line(
    moto_server: MotoServer, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials(moto_server)
    for place, kind, message in (
        (f"s3://no-such-bucket?endpoint={moto_server.endpoint}", Unsuitable, "no such bucket"),
        ("s3://bucket?endpoint=http://127.0.0.1:9", Unavailable, "does not answer"),
    ):
        with pytest.raises(kind, match=message) as caught:
            open_exchange(place, "job")
        assert "\n" not in str(caught.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Unsuitable, match=r"no credentials .* set AWS_ACCESS_KEY_ID"):
        open_exchange(url(moto_server), "job")
