"""The exchange in an S3-compatible bucket, by boto3: the durable one.

    <root><key>                          the value; size, checksum, end of life and writer are its metadata
    <root>+expires/<key>@<milliseconds>  written before a value with a lifetime, so that listing and sweeping find its
                                         end without asking for every object's metadata
    <prefix>+probe                       shows at opening whether conditional puts are honoured

A value with a lifetime ends in NONCE_BYTES random bytes beyond its size: its ETag is then like no other's, and an
expired value can be replaced by `If-Match` with exactly one winner even when old and new content are the same.
A conditional put whose answer was lost is repeated by boto3 and then refused by our own object: the writer's sign in
the metadata tells. What is needed of a server: docs/exchange.md.
"""

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import boto3
import botocore.config
import botocore.loaders
import botocore.session
from botocore.exceptions import ClientError

from functions.base.wire import Ref
from functions.exchange.base import (
    Corrupt,
    Data,
    Exchange,
    NotFound,
    Unavailable,
    Unsuitable,
    check_key,
    check_prefix,
    check_range,
    checksum,
)
from functions.exchange.s3_body import Head, Marks, Value, Views, body, mark_key, parse_mark, parts
from functions.exchange.s3_errors import NOT_THERE, code, s3_errors, status

PART_THREADS = 4
MAX_PUT_BYTES = 5 << 30
"""S3's limit of a single put, and so of a conditional one."""
LOOK_FIRST_BYTES = 1 << 20
"""Before a longer conditional put, a HEAD: a loser need not send its value."""
CONNECT_S, READ_S, TRIES = 5.0, 30.0, 2
"""A request that moves no byte for READ_S has failed, whatever its call may take: a store whose disk is full may accept
a put and never answer. After TRIES the store is away."""
POLL_S = (0.1, 0.5)
SWEEP_KEYS = 100
"""A put removes at most so many expired values."""
CONFLICT_TRIES = 10

Keys = list[str]


class Fence(Protocol):
    """Mutual exclusion, for stores that refuse conditional puts."""

    def lock(self, key: str) -> AbstractContextManager[None]: ...


class S3Exchange:
    """See `Exchange`. Credentials come from boto3's chain (environment, files, the pod's identity), never from a URL.

    Keys lie under `<prefix><job>/`; `fence` stands in for conditional puts where the store refuses them.
    Raises Unsuitable when the bucket, the credentials or the store's conditional put will not do. Open it in the
    process that uses it: connections do not survive a fork.
    """

    part_bytes = 64 << 20
    multipart_bytes = 512 << 20
    """Longer values go up in parts. 256 MB so against one put, on two busy cores: radosgw 0.8 to 1.2 times as fast,
    moto 0.4 to 1.0; weights come in shards of 256 MB at most, several at once."""
    sweep_every_s = 60.0
    sweep_grace_s = 3600.0
    """What expired is removed only so long after its end, when nobody is about to write the same key again."""

    def __init__(
        self, bucket: str, prefix: str, job: str, *, endpoint: str | None = None, region: str | None = None,
        fence: Fence | None = None,
    ) -> None:  # fmt: skip
        self.bucket = bucket
        self.root = f"{prefix}{job}/"
        self.name = f"s3://{bucket}/{prefix}" + (f" at {endpoint}" if endpoint else "")
        self.fence = fence
        self._next_sweep = time.monotonic() + self.sweep_every_s
        self._swept_to = ""
        with s3_errors("opening", self.name):
            self.client = _client(endpoint, region)
            self.conditional = self._probe(f"{prefix}+probe")

    @property
    def durable(self) -> Exchange:
        return self

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        value = Value.of(key, data, lifetime_s)
        with s3_errors(key, self.name):
            self._mark(value)
            if value.stored_bytes > self.multipart_bytes:
                self._put_parts(value)
            else:
                self._put(value)
        return value.ref

    def put_if_absent(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref | None:
        value = Value.of(key, data, lifetime_s)
        if value.stored_bytes > MAX_PUT_BYTES:
            raise Unsuitable(f"{key}: a conditional put of {value.stored_bytes} bytes; S3 takes 5 GiB in one put")
        with s3_errors(key, self.name):
            won = self._put_native(value) if self.conditional == "native" else self._put_fenced(value)
        return value.ref if won else None

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        path = key.key if isinstance(key, Ref) else key
        whole = start == 0 and length is None
        if not whole and (start < 0 or (length is not None and length <= 0)):
            return self._empty(key, start, length)
        span = {} if whole else {"Range": f"bytes={start}-{'' if length is None else start + length - 1}"}
        with s3_errors(path, self.name):
            try:
                response = self.client.get_object(Bucket=self.bucket, Key=self._name(path), **span)
            except ClientError as error:
                if status(error) == 403:
                    self._current(key, self._head(path))
                if status(error) != 416:
                    raise
                return self._empty(key, start, length)
            with contextlib.closing(response["Body"]) as stream:
                head = self._current(key, Head.read(path, response))
                _, wanted = check_range(path, head.size_bytes, start, length)
                data: bytes = stream.read()
        data = data if len(data) <= wanted else data[:wanted]
        if len(data) != wanted or (whole and checksum(data) != head.checksum):
            raise Corrupt(f"{path}: the bytes in {self.name} are not those that were written (checksum differs)")
        return data

    def list(self, prefix: str) -> Keys:
        with s3_errors(prefix or "listing", self.name):
            return self._look(prefix)[0]

    def wait(self, key: str, timeout_s: float) -> bool:
        end, pause = time.monotonic() + timeout_s, POLL_S[0]
        while not self.exists(key):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, POLL_S[1])
        return True

    def delete(self, prefix: str) -> int:
        with s3_errors(prefix or "deleting", self.name):
            live, keys, marks = self._look(prefix)
            self._delete([*keys, *(mark_key(*mark) for mark in marks)])
        return len(live)

    def exists(self, key: str) -> bool:
        with s3_errors(key, self.name):
            return self._live(check_key(key))

    def remove(self, key: str) -> None:
        """Deletes exactly this key."""
        with s3_errors(key, self.name):
            self._delete([check_key(key)])

    def sweep(self, limit: int = SWEEP_KEYS) -> int:
        """Removes at most `limit` values past their lifetime (and the grace); how many. `put` does it now and then."""
        swept = 0
        latest_ms = (time.time() - self.sweep_grace_s) * 1000
        with s3_errors("sweeping", self.name):
            page = self.client.list_objects_v2(
                Bucket=self.bucket, Prefix=f"{self.root}+expires/", StartAfter=self._swept_to
            )
            self._swept_to = page["Contents"][-1]["Key"] if page["IsTruncated"] else ""
            names = [entry["Key"][len(self.root) :] for entry in page.get("Contents", [])]
            for key, expires_ms in [mark for name in names for mark in parse_mark(name)]:
                if expires_ms > latest_ms or swept == limit:
                    continue
                head = self._head(key)
                gone = head is not None and 0 < head.expires_ms <= latest_ms
                self._delete(([key] if gone else []) + [mark_key(key, expires_ms)])
                swept += gone
        return swept

    # -- conditional puts

    def _probe(self, name: str) -> Literal["native", "fenced"]:
        """How conditional puts are done here. The object stays, so that later openings need one request."""
        for _ in range(2):
            try:
                self.client.put_object(Bucket=self.bucket, Key=name, Body=b"exchange\n", IfNoneMatch="*")
            except ClientError as error:
                if status(error) == 412:
                    return "native"
                if status(error) != 501:
                    raise
                if self.fence is not None:
                    return "fenced"
                raise Unsuitable(
                    f"{self.name} refuses conditional puts (If-None-Match: 501), without which two trainers could "
                    "both commit: use tiered+s3:// (Redis fences them) or a store that has them"
                ) from error
        raise Unsuitable(
            f"{self.name} silently ignores conditional puts (If-None-Match), without which two trainers could both "
            "commit: use a store that honours them (AWS S3, MinIO, Ceph, Cloudflare R2)"
        )

    def _put_native(self, value: Value) -> bool:
        if value.stored_bytes > LOOK_FIRST_BYTES and self._live(value.ref.key):
            return False
        self._mark(value)
        if self._put(value, IfNoneMatch="*"):
            return True
        try:
            head = self._head(value.ref.key)
        except Corrupt:
            return False
        if head is None:  # deleted since
            return self._put(value, IfNoneMatch="*")
        # AWS wants the ETag in its quotes, Ceph 16 knows it only without them.
        return head.expired and (self._put(value, IfMatch=head.etag) or self._put(value, IfMatch=head.etag.strip('"')))

    def _put_fenced(self, value: Value) -> bool:
        assert self.fence is not None
        with self.fence.lock(value.ref.key):
            if self._live(value.ref.key):
                return False
            self._mark(value)
            return self._put(value)

    def _put(self, value: Value, **condition: str) -> bool:
        """One put; False when the condition does not hold. Where the answer was lost, the writer's sign tells."""
        name, metadata = self._name(value.ref.key), value.metadata
        for attempt in range(CONFLICT_TRIES):
            try:
                self.client.put_object(
                    Bucket=self.bucket, Key=name, Body=body(value.stored), Metadata=metadata, **condition
                )
            except ClientError as error:
                if condition and status(error) in (404, 412):
                    return self._wrote(value)
                if not condition or status(error) != 409 or attempt == CONFLICT_TRIES - 1:
                    raise
                time.sleep(0.02 * (attempt + 1))  # AWS: another conditional put of this key is under way
            else:
                return True
        raise AssertionError("unreachable")

    def _wrote(self, value: Value) -> bool:
        """Whether it is ours that lies there."""
        try:
            head = self._head(value.ref.key)
        except Corrupt:
            return False
        return head is not None and head.writer == value.writer

    def _put_parts(self, value: Value) -> None:
        name = self._name(value.ref.key)
        place = {"Bucket": self.bucket, "Key": name}
        upload = self.client.create_multipart_upload(**place, Metadata=value.metadata)["UploadId"]

        def send(number: int, part: Views) -> dict[str, object]:
            etag = self.client.upload_part(**place, UploadId=upload, PartNumber=number, Body=body(part))["ETag"]
            return {"PartNumber": number, "ETag": etag}

        try:
            with concurrent.futures.ThreadPoolExecutor(PART_THREADS) as pool:
                sent = list(pool.map(send, *zip(*enumerate(parts(value.stored, self.part_bytes), 1), strict=True)))
            self.client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": sent})
        except BaseException:
            with contextlib.suppress(Exception):
                self.client.abort_multipart_upload(**place, UploadId=upload)
            raise

    # -- objects

    def _name(self, key: str) -> str:
        return self.root + check_key(key)

    def _head(self, key: str) -> Head | None:
        name = self._name(key)
        try:
            return Head.read(key, self.client.head_object(Bucket=self.bucket, Key=name))
        except ClientError as error:
            if code(error) in NOT_THERE:
                return None
            if status(error) == 403:  # also of what is absent, to who may not list the whole bucket
                found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=name, MaxKeys=1).get("Contents", [])
                if [entry["Key"] for entry in found] != [name]:
                    return None
            raise

    def _live(self, key: str) -> bool:
        """Whether there is a value (an altered one counts: it is `get` that refuses it)."""
        try:
            head = self._head(key)
        except Corrupt:
            return True
        return head is not None and not head.expired

    def _current(self, key: str | Ref, head: Head | None) -> Head:
        path = key.key if isinstance(key, Ref) else key
        if head is None or head.expired:
            raise NotFound(f"{path}: no such value in {self.name}", path)
        if isinstance(key, Ref) and (key.size_bytes, key.checksum) != (head.size_bytes, head.checksum):
            raise Corrupt(f"{path}: the value in {self.name} is not the one that was referred to ({key})")
        return head

    def _empty(self, key: str | Ref, start: int, length: int | None) -> bytes:
        """The answer to a range of no bytes, or ValueError for one outside the value."""
        path = key.key if isinstance(key, Ref) else key
        with s3_errors(path, self.name):
            head = self._current(key, self._head(path))
        check_range(path, head.size_bytes, start, length)
        return b""

    def _mark(self, value: Value) -> None:
        """For a value with a lifetime: its mark, and now and then a sweep of others."""
        if not value.expires_ms:
            return
        if time.monotonic() > self._next_sweep:
            self._next_sweep = time.monotonic() + self.sweep_every_s
            self.sweep()
        mark = self.root + mark_key(value.ref.key, value.expires_ms)
        self.client.put_object(Bucket=self.bucket, Key=mark, Body=b"")

    def _look(self, prefix: str) -> tuple[Keys, Keys, Marks]:
        """The keys of values under `prefix`, sorted; with those that have expired; and the marks."""
        marks, now_ms = self._marks(check_prefix(prefix)), time.time() * 1000
        ended = {key for key, expires_ms in marks if expires_ms <= now_ms}
        keys = [key for key in self._keys(prefix) if not key.startswith("+")]
        return sorted(key for key in keys if key not in ended or self._live(key)), keys, marks

    def _keys(self, prefix: str) -> Iterator[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.root + prefix)
        for page in pages:
            for entry in page.get("Contents", []):
                yield entry["Key"][len(self.root) :]

    def _marks(self, prefix: str) -> Marks:
        return [mark for name in self._keys(f"+expires/{prefix}") for mark in parse_mark(name)]

    def _delete(self, keys: Keys) -> None:
        for at in range(0, len(keys), 1000):
            batch = [{"Key": self.root + key} for key in keys[at : at + 1000]]
            try:
                answer = self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True})
            except ClientError as error:
                if code(error) != "AccessDenied":
                    raise
                for one in batch:  # Ceph 16 refuses many at once where a session's policy says for which
                    self.client.delete_object(Bucket=self.bucket, **one)
                continue
            if answer.get("Errors"):
                raise Unavailable(
                    f"{answer['Errors'][0].get('Key')}: {self.name} did not delete it: {answer['Errors'][0]}", self.name
                )


def _client(endpoint: str | None, region: str | None, **credentials: Any) -> Any:
    config = botocore.config.Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"mode": "standard", "max_attempts": TRIES},
        max_pool_connections=32,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",  # values carry an xxh3; older servers know no CRC
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    session = botocore.session.get_session()
    session.register_component("data_loader", _service_descriptions())
    region = region or ("us-east-1" if endpoint else None)
    boto = boto3.session.Session(botocore_session=session)
    return boto.client("s3", endpoint_url=endpoint, region_name=region, config=config, **credentials)


@functools.cache
def _service_descriptions() -> botocore.loaders.Loader:
    """boto3 parses 70 ms of JSON for a client: once a process (and its forked children)."""
    return botocore.loaders.create_loader()


def preload() -> None:
    """What an opening loads, for the processes that are forked from this one: 0.25 s of each on a CPU."""
    client = _client("http://localhost", None, aws_access_key_id="-", aws_secret_access_key="-")
    client.generate_presigned_url("get_object", Params={"Bucket": "-", "Key": "-"})  # sends nothing
    client.close()
