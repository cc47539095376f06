"""URLs of exchanges: each form that is wrong gets one line that says what would be right, and never a secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from functions.exchange.directory import DirectoryExchange
from functions.exchange.open import open_exchange


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "a directory, or a URL"),
        ("ftp://host/path", "no kind 'ftp' .*redis.*tiered"),
        ("dir://relative/path", "dir:///absolute/path"),
        ("dir:///path?x=1", "dir:///absolute/path"),
        ("redis:///0", "redis://host:6379/0"),
        ("redis://:hunter2@host/0", "set REDIS_PASSWORD"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://key:hunter2@bucket/prefix", "s3://bucket/prefix"),
        ("s3://bucket/a b", "not an exchange key"),
        ("s3://bucket?endpoint=localhost:9000", "does not begin with http"),
        ("s3://bucket?endpiont=http://localhost:9000", r"unknown option 'endpiont' \(endpoint, region\)"),
        ("tiered+s3://bucket", "needs its Redis"),
        ("tiered+s3://bucket?redis=http://host", "redis://host:6379/0"),
        ("tiered+s3://bucket?redis=redis://:hunter2@host", "set REDIS_PASSWORD"),
    ],
)
def test_a_wrong_url_gets_one_line(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_exchange(url, "job")
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_is_one_part_of_a_key(tmp_path: Path) -> None:
    for job in ("", "a/b", "..", "a b"):
        with pytest.raises(ValueError, match=r"job|exchange key"):
            open_exchange(f"dir://{tmp_path}", job)
    for job in ("", "a/b", ".."):
        with pytest.raises(ValueError, match="names a folder of the exchange"):
            open_exchange(str(tmp_path), job)
    assert list(tmp_path.iterdir()) == []
    open_exchange(str(tmp_path), "ein Lauf für heute").put("k", b"v")  # a run directory may have any name


def test_a_path_and_its_url_are_the_same_directory(tmp_path: Path) -> None:
    open_exchange(str(tmp_path / "with space"), "job").put("k", b"v")
    exchange = open_exchange(f"dir://{tmp_path}/with%20space", "job")
    assert isinstance(exchange, DirectoryExchange)
    assert exchange.get("k") == b"v"


def test_a_directory_needs_neither_boto3_nor_redis(tmp_path: Path) -> None:
    program = (
        "import sys; from functions.exchange.open import open_exchange; "
        f"open_exchange({str(tmp_path)!r}, 'job').put('k', b'v'); "
        "print(sorted({'boto3', 'botocore', 'redis', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
