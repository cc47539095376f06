"""The stores that chaos runs over: real servers, and their journal records as raw bytes, to be spoilt and brought back.

directory   files of the run directory              s3       an S3 server behind what takes it away
redis       a server whose restart loses all        tiered   both
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.exchange.servers import LosesAnswers, MotoServer, RedisServer

STORES = ("directory", "redis", "s3", "tiered")
Raw = dict[Any, tuple[bytes, Mapping[str, str]]]
"""Bytes and metadata of journal records, by what their store calls them."""


class Stores:
    """Both servers, from `start` to `stop`. A job has what is its own under its name."""

    def __init__(self, folder: Path) -> None:
        for name in ("redis", "s3"):
            (folder / name).mkdir()
        self.redis, self.moto = RedisServer(folder / "redis"), MotoServer(folder / "s3")
        self.relay: LosesAnswers | None = None

    def start(self) -> Stores:
        self.redis.start()
        self.moto.start().make_bucket("bucket")
        self.relay = LosesAnswers(self.moto.port, always=True)
        return self

    def stop(self) -> None:
        if self.relay is not None:
            self.relay.stop()
        self.redis.stop()
        self.moto.stop()

    def url(self, store: str) -> str | None:
        """The job's `exchange.url`; None: its run directory."""
        s3 = f"s3://bucket/jobs?endpoint=http://127.0.0.1:{self.relay.port if self.relay else 0}"
        return {"redis": self.redis.url, "s3": s3, "tiered": f"tiered+{s3}&redis={self.redis.url}"}.get(store)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """S3 answers nothing."""
        assert self.relay is not None
        self.relay.armed.set()
        try:
            yield
        finally:
            self.relay.armed.clear()

    def flush(self) -> None:
        with self._redis() as client:
            client.flushall()

    def restart(self) -> None:
        """Redis is away for a moment and comes back empty."""
        self.redis.stop()
        self.redis.start()

    @contextlib.contextmanager
    def spoilt(self, store: str, run: Path, job: str, how: str, pick: float) -> Iterator[bool]:
        """A record (chosen by `pick` in [0, 1)) is cut off or has a bit turned, or the last is gone; then restored.

        "flush": all that the job has in Redis is gone. Yields whether there was something to spoil.
        """
        raw = self._raw(store, run, job, "*" if how == "flush" else "journal/*.json")
        if not raw:
            yield False
            return
        keys = sorted(raw)
        if how in ("delete", "flush"):
            for key in keys if how == "flush" else keys[-1:]:
                self._write(store, key, None, {})
        else:
            key = keys[int(pick * len(keys))]
            data, metadata = raw[key]
            self._write(store, key, _cut(data, pick) if how == "truncate" else _flipped(data, pick), metadata)
        try:
            yield True
        finally:
            for key, (data, metadata) in raw.items():
                self._write(store, key, data, metadata)

    def _raw(self, store: str, run: Path, job: str, pattern: str) -> Raw:
        if store == "directory":
            return {path: (path.read_bytes(), {}) for path in run.glob(pattern) if path.is_file()}
        if store == "redis":
            with self._redis() as client:
                keys = [key for key in client.scan_iter(match=f"*{job}/{pattern}") if client.type(key) == b"string"]
                return {key: (client.get(key), {}) for key in keys}
        with self._s3() as client:
            found = client.list_objects_v2(Bucket="bucket", Prefix=f"jobs/{job}/journal/").get("Contents", [])
            objects = {entry["Key"]: client.get_object(Bucket="bucket", Key=entry["Key"]) for entry in found}
            return {key: (value["Body"].read(), value["Metadata"]) for key, value in objects.items()}

    def _write(self, store: str, key: Any, data: bytes | None, metadata: Mapping[str, str]) -> None:
        """None: removes it."""
        if store == "directory":
            key.unlink(missing_ok=True)  # never written in place: records are published as hard links
            if data is not None:
                key.write_bytes(data)
        elif store == "redis":
            with self._redis() as client:
                if data is None:
                    client.delete(key)
                else:
                    client.set(key, data)
        else:
            with self._s3() as client:
                if data is None:
                    client.delete_object(Bucket="bucket", Key=key)
                else:
                    client.put_object(Bucket="bucket", Key=key, Body=data, Metadata=dict(metadata))

    @contextlib.contextmanager
    def _redis(self) -> Iterator[Any]:
        import redis

        with redis.Redis(port=self.redis.port) as client:
            yield client

    @contextlib.contextmanager
    def _s3(self) -> Iterator[Any]:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.moto.endpoint,
            aws_access_key_id=self.moto.access_key,
            aws_secret_access_key=self.moto.secret_key,
            region_name="us-east-1",
        )
        with contextlib.closing(client):
            yield client


def _cut(data: bytes, pick: float) -> bytes:
    return data[: int(pick * len(data))]


def _flipped(data: bytes, pick: float) -> bytes:
    changed, bit = bytearray(data), int(pick * 8 * len(data))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
