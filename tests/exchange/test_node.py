"""The node's tier over a store that counts what it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from functions.base.wire import Ref, Version
from functions.exchange.base import NotFound, checksum
from functions.exchange.directory import DirectoryExchange
from functions.exchange.node import NodeExchange
from functions.weights.base import import_model
from functions.weights.manifest import read_manifest
from functions.weights.ranges import read_blobs
from functions.weights.store import fetch
from tests.support.train_call import save_tiny

DATA = bytes(range(256)) * 1000
KEY = f"weights/actor/v000001/shard-00000.{checksum(DATA)}"


class Store(DirectoryExchange):
    """A directory that says what was read of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []

    def get(self, key: str | Ref, *, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append(key.key if isinstance(key, Ref) else key)
        return super().get(key, start=start, length=length)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def tier(store: Store, limit_bytes: int = 1 << 30) -> NodeExchange:
    """As another process of the node has it."""
    return NodeExchange(store, store.root.parent / "node", limit_bytes)


def copies(store: Store) -> dict[str, int]:
    found = (store.root.parent / "node").iterdir()
    return {path.name: path.stat().st_size for path in found if not path.name.startswith("+")}


def test_what_was_written_on_a_node_is_read_there_whole_and_in_part(store: Store) -> None:
    ref = tier(store).put(KEY, [DATA[:1000], DATA[1000:]])
    reader = tier(store)
    assert reader.get(KEY, start=700, length=900) == DATA[700:1600]
    assert reader.get(KEY, start=255_999) == DATA[255_999:]
    assert reader.get(ref) == reader.get(KEY) == DATA
    assert store.reads == []
    assert store.get(KEY) == DATA, "it lies in the store all the same"
    with pytest.raises(ValueError, match="outside the value's 256000 bytes"):
        reader.get(KEY, start=255_000, length=2000)


def test_what_was_read_is_there_for_the_next_reader(store: Store) -> None:
    store.put(KEY, DATA)
    for _ in range(2):
        assert tier(store).get(KEY, start=0, length=100) == DATA[:100]
    assert len(store.reads) == 1
    for _ in range(2):
        assert tier(store).get(KEY) == DATA
    assert len(store.reads) == 2


def test_other_keys_are_the_stores_alone(store: Store) -> None:
    node = tier(store)
    node.put("journal/1", b"one")
    node.put("journal/1", b"two")
    named = f"weights/x.{checksum(b'another')}"
    node.put(named, b"not what it is named after")
    assert (node.get("journal/1"), node.get(named)) == (b"two", b"not what it is named after")
    assert node.put_if_absent("journal/1", b"three") is None
    assert node.list("") == store.list("")
    assert node.wait("journal/1", 0)
    assert node.delete("journal/") == 1
    with pytest.raises(NotFound):
        node.get("journal/1")


@pytest.mark.parametrize("part", [{}, {"start": 10, "length": 20}], ids=["whole", "part"])
@pytest.mark.parametrize("harm", ["altered", "truncated", "another's"])
def test_a_copy_that_is_not_what_it_should_be_falls_through_and_says_so(
    store: Store, harm: str, part: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    tier(store).put(KEY, DATA)
    [path] = [path for path in (store.root.parent / "node").iterdir() if not path.name.startswith("+")]
    if harm == "altered":
        path.write_bytes(b"x" + path.read_bytes()[1:])
    elif harm == "truncated":
        os.truncate(path, 5000)
    else:
        DirectoryExchange(path.parent).put(path.name, b"another value")
    expected = DATA[10:30] if part else DATA
    assert tier(store).get(KEY, **part) == expected
    assert len(store.reads) == 1
    assert "it is removed, and read from the store" in caplog.text
    assert tier(store).get(KEY, **part) == expected
    assert len(store.reads) == 1, "there is a good one again"


def test_a_full_tier_drops_what_was_used_longest_ago(store: Store) -> None:
    values = [os.urandom(10_000) for _ in range(4)]
    keys = [f"shard.{checksum(value)}" for value in values]
    node = tier(store, limit_bytes=32_000)
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        if number == 3:
            for age, old in enumerate(keys[:3]):
                os.utime(node.directory / old.partition(".")[2], (age, age))
            node.get(keys[0])
        node.put(key, value)
    assert set(copies(store)) == {key.partition(".")[2] for key in (keys[0], keys[2], keys[3])}
    assert [node.get(key) for key in keys] == values
    node.put(KEY, DATA)
    assert checksum(DATA) not in copies(store), "larger than all of it"


@pytest.mark.parametrize("when", ["opened", "written"])
def test_a_tier_that_cannot_be_written_is_said_once_and_goes_without(
    store: Store, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = store.root.parent / "node"
    if when == "opened":
        directory.write_bytes(b"a file")
    node = tier(store)
    if when == "written":
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        directory.rmdir()
    for _ in range(2):
        node.put(KEY, DATA)
        assert node.get(KEY) == DATA
    assert caplog.text.count(f"could not be {when}") == 1


def test_a_version_that_was_published_on_a_node_is_loaded_there_without_its_store(store: Store, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    version = import_model(tier(store), "actor", tmp_path / "model")
    reader = tier(store)
    manifest = read_manifest(reader, version)
    store.reads.clear()
    loaded = {entry.name: bytes(data) for entry, data in read_blobs(reader, manifest, manifest.tensors)}
    assert store.reads == []
    there = read_blobs(store, manifest, manifest.tensors)
    assert loaded == {entry.name: bytes(data) for entry, data in there}
    assert fetch(reader, Version("actor", 0)).keys() == loaded.keys()


def test_what_a_node_holds_alone_is_nowhere_else(store: Store, tmp_path: Path) -> None:
    node = tier(store)
    assert node.hold(KEY, [DATA[:1000], DATA[1000:]])
    assert tier(store).get(KEY) == DATA
    assert tier(store).get(KEY, start=700, length=900) == DATA[700:1600]
    assert store.list("") == []
    another = NodeExchange(store, tmp_path / "another", 1 << 30)
    with pytest.raises(NotFound) as caught:
        another.get(KEY)
    assert caught.value.key == KEY
    assert node.identity == tier(store).identity != another.identity
    assert not NodeExchange(store, tmp_path / "small", 1000).hold(KEY, DATA)
    assert not node.hold("weights/actor/v000001/named-by-no-content", DATA)
