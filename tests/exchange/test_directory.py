"""The exchange in a directory: the conformance suite, and what only files can suffer."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from functions.exchange import directory
from functions.exchange.base import Corrupt, NotFound, Unavailable, Unsuitable
from functions.exchange.directory import DirectoryExchange
from functions.exchange.open import open_exchange
from tests.exchange.conformance import Backend, Conformance, noise
from tests.support.waiting import until


class RawFiles:
    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def write(self, key: str, stored: bytes) -> None:
        (self.root / key).write_bytes(stored)


class TestDirectory(Conformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return Backend(f"dir://{tmp_path}", RawFiles(tmp_path), lambda: shutil.rmtree(tmp_path))

    @pytest.fixture
    def dying(self, backend: Backend) -> Backend:
        return backend


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(tmp_path / "exchange")


def files(exchange: DirectoryExchange) -> list[str]:
    return sorted(str(path.relative_to(exchange.root)) for path in exchange.root.rglob("*") if path.is_file())


def test_a_json_value_can_be_read_by_a_person(exchange: DirectoryExchange) -> None:
    exchange.put("journal/1.json", b'{"step": 1}')
    first, second = (exchange.root / "journal/1.json").read_text().splitlines()
    assert first == '{"step": 1}'
    assert second.startswith("# exchange size=000000000000011 xxh3=")


def test_every_altered_byte_of_a_file_is_noticed(exchange: DirectoryExchange) -> None:
    exchange.put("k", b"twelve bytes", lifetime_s=60)
    path = exchange.root / "k"
    stored = path.read_bytes()
    for at in range(len(stored)):
        path.write_bytes(stored[:at] + bytes([stored[at] ^ 0x04]) + stored[at + 1 :])
        with pytest.raises(Corrupt, match=r"^k: "):
            exchange.get("k")


FULL_DISK = """
import sys
from functions.exchange.base import Full
from functions.exchange.directory import DirectoryExchange
exchange = DirectoryExchange(sys.argv[1])
exchange.put("k", b"small")
for put in (exchange.put, exchange.put_if_absent):
    for key in ("k2", "f/k3"):
        try:
            put(key, [b"x" * 700_000] * 3)
        except Full as error:
            print(error)
exchange.put("k4", b"still works")
print(exchange.list(""), sum(1 for path in exchange.root.rglob("*") if path.is_file()))
"""


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Path:
    """A file system of 1 MB: a tmpfs in a user namespace of its own needs no root."""
    probe = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if probe.returncode != 0:
        pytest.skip(f"no tmpfs of our own here: {probe.stderr.decode().strip()}")
    return tmp_path


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tiny_disk: Path) -> None:
    script = f'mount -t tmpfs -o size=1m tmpfs "{tiny_disk}" && exec "$0" -c "$1" "{tiny_disk}"'
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, FULL_DISK], capture_output=True, text=True, check=True
    )
    *refusals, rest = run.stdout.splitlines()
    assert [line.split(":")[0] for line in refusals] == ["k2", "f/k3"] * 2
    assert all("is full (No space left on device)" in line and "checkpoints.keep" in line for line in refusals)
    assert rest == "['k', 'k4'] 3"  # and the lock


def test_a_file_too_large_for_the_limits_is_refused_whole(exchange: DirectoryExchange) -> None:
    """EFBIG, in the middle of a value: RLIMIT_FSIZE of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))
    try:
        with pytest.raises(Unavailable, match=r"k: .*File too large"):
            exchange.put("k", noise(5 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert files(exchange) == ["+lock"]


def test_the_sweep_removes_what_expired_and_what_killed_writers_left(exchange: DirectoryExchange) -> None:
    exchange.put("a/b", b"v", lifetime_s=0.05)
    exchange.put("a/c", b"v", lifetime_s=60)
    for name, age_s in (("left", directory.ABANDONED_S + 10), ("busy", 10)):
        path = exchange.root / "+tmp" / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    until(lambda: not exchange.wait("a/b", 0))
    assert exchange.sweep() == 2
    assert files(exchange) == ["+lock", "+tmp/busy", "a/c"]


def test_a_put_sweeps_now_and_then(tmp_path: Path) -> None:
    class Sweeping(DirectoryExchange):
        sweep_every_s = 0.0

    exchange = Sweeping(tmp_path)
    exchange.put("a", b"v", lifetime_s=0.01)
    until(lambda: not exchange.wait("a", 0))
    exchange.put("b", b"v")
    assert files(exchange) == ["+lock", "b"]


def test_delete_leaves_no_empty_folders(exchange: DirectoryExchange) -> None:
    exchange.put("a/b/c/d", b"")
    exchange.put("a/e", b"")
    exchange.delete("a/b/")
    assert sorted(path.name for path in (exchange.root / "a").iterdir()) == ["e"]


def test_a_key_is_not_both_value_and_folder(exchange: DirectoryExchange) -> None:
    exchange.put("a", b"v")
    exchange.put("b/c", b"v")
    for key in ("a/x", "b"):
        for put in (exchange.put, exchange.put_if_absent):
            with pytest.raises(ValueError, match=f"^{key}: one of its folders"):
                put(key, b"")
    with pytest.raises(NotFound):
        exchange.get("b")
    with pytest.raises(NotFound):
        exchange.get("a/x")
    assert files(exchange) == ["+lock", "a", "b/c"]


def test_bad_places_get_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in (str(tmp_path / "file"), f"dir://{tmp_path}/file/below", "/proc/nothing/here"):
        with pytest.raises(Unsuitable, match="cannot be used as an exchange") as caught:
            open_exchange(url, "job")
        assert "\n" not in str(caught.value)


def test_other_files_in_the_directory_are_no_values(exchange: DirectoryExchange) -> None:
    (exchange.root / "notes.txt").write_text("by hand")
    with pytest.raises(Corrupt, match=r"notes.txt"):
        exchange.get("notes.txt")
