"""Deltas: the encoding against a plain loop, and copies that follow a model bit for bit or say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from functions.base.wire import Version
from functions.exchange.base import Corrupt, NotFound
from functions.exchange.directory import DirectoryExchange
from functions.weights.base import import_model
from functions.weights.blobs import Blob
from functions.weights.delta import Difference, decode, decode_gaps, difference, encode_gaps
from functions.weights.local_copy import LocalCopy
from functions.weights.manifest import Manifest, TensorEntry, block_hashes, keep_only, manifest_key, read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import blobs, fetch
from tests.support.versions import publish

Tensors = dict[str, Tensor]
DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64, "i64": torch.int64,
    "u8": torch.uint8, "f8": torch.float8_e4m3fn,
}  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tensors(seed: int = 0) -> Tensors:
    """Every bit pattern: NaNs with payload, infinities, both zeros."""
    torch.manual_seed(seed)
    return {
        name: torch.randint(0, 256, (37, 11 * dtype.itemsize), dtype=torch.uint8).view(dtype)
        for name, dtype in DTYPES.items()
    } | {"empty": torch.zeros(0, 4, dtype=torch.bfloat16), "scalar": torch.tensor(7)}


def changed(tensors: Tensors, share: float, seed: int = 1) -> Tensors:
    """About `share` of the elements with one bit flipped."""
    rng, result = np.random.default_rng(seed), {}
    for name, tensor in tensors.items():
        data = bits(tensor).numpy().copy().reshape(-1, tensor.dtype.itemsize)
        rows = np.flatnonzero(rng.random(len(data)) < share)
        data[rows, rng.integers(0, data.shape[1], len(rows))] ^= np.uint8(1) << rng.integers(0, 8, len(rows), np.uint8)
        result[name] = torch.from_numpy(data.reshape(-1)).view(tensor.dtype).view(tensor.shape)
    return result


def same(one: Tensors, two: Tensors) -> bool:
    return one.keys() == two.keys() and all(torch.equal(bits(one[name]), bits(two[name])) for name in one)


def manifest_of(tensors: Tensors) -> Manifest:
    entries = [TensorEntry(n, b.dtype, b.shape, (), block_hashes(b.data)) for n, b in blobs(tensors).items()]
    return Manifest(Version("policy", 0), None, tuple(entries))


def applied(old: Tensors, delta: Difference) -> Tensors:
    """By a loop over single elements."""
    result = {name: bits(tensor).clone().view(-1, tensor.dtype.itemsize) for name, tensor in old.items()}
    for part in delta.parts:
        for section in decode(part):
            for position, value in zip(section.positions.tolist(), section.values, strict=True):
                result[section.tensor][position] = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
    return {name: data.view(-1).view(old[name].dtype).view(old[name].shape) for name, data in result.items()}


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2**28 - 1), unique=True, max_size=50), st.lists(st.integers(0, 300), max_size=300))
def test_gaps_are_leb128_and_come_back(far: list[int], near: list[int]) -> None:
    positions = sorted({*far, *np.cumsum(near).tolist()})
    expected, last = bytearray(), -1
    for position in positions:
        gap, last = position - last - 1, position
        while gap >= 128:
            expected.append(gap & 127 | 128)
            gap >>= 7
        expected.append(gap)
    encoded = encode_gaps(np.array(positions, np.int64))
    assert encoded == bytes(expected)
    assert decode_gaps(encoded, len(positions)).tolist() == positions


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.001, 0.02, 0.1]), st.integers(1, 400))
def test_what_changed_and_nothing_else_is_in_a_delta(seed: int, share: float, part_bytes: int) -> None:
    old = random_tensors(seed)
    new = changed(old, share, seed)
    delta = difference(manifest_of(old), blobs(old), blobs(new), part_bytes=part_bytes)
    assert delta is not None
    assert delta.parts
    assert same(applied(old, delta), new)
    differing = sum(int((bits(old[n]) != bits(new[n])).view(-1, old[n].dtype.itemsize).any(1).sum()) for n in old)
    assert delta.changed == differing == sum(len(s.positions) for part in delta.parts for s in decode(part))
    assert delta.elements == sum(t.numel() for t in old.values())


def test_elements_are_compared_as_bits() -> None:
    old = {"w": torch.tensor([0.0, float("nan"), 1.0] + [2.0] * 29)}
    new = {"w": torch.tensor([-0.0, float("nan"), 1.0] + [2.0] * 29)}
    new["w"].view(torch.int32)[2] = 0x7FC00001  # a NaN with a payload
    delta = difference(manifest_of(old), blobs(old), blobs(new))
    assert delta is not None
    (section,) = decode(delta.parts[0])
    assert section.positions.tolist() == [0, 2]
    assert section.values.tolist() == [0x80000000, 0x7FC00001]


def test_tensors_longer_than_a_section() -> None:
    old = {"w": torch.arange(1050, dtype=torch.int32)}
    new = {"w": old["w"].clone()}
    new["w"][[0, 99, 100, 555, 1049]] = -1
    delta = difference(manifest_of(old), blobs(old), blobs(new), section_elements=100)
    assert delta is not None
    assert same(applied(old, delta), new)
    assert len(list(decode(delta.parts[0]))) == 4


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_writers_of_parts_say_together_what_changed(seed: int, writers: int) -> None:
    """Blocks dealt at random to several writers, as ranks of a gang have them."""
    old = {name: tensor.repeat(40, 1) for name, tensor in random_tensors(seed).items() if name in ("bf16", "i64", "u8")}
    new, result, rng = changed(old, 0.05, seed), old, np.random.default_rng(seed)
    count = 0
    parent, edges = manifest_of(old), {}
    for entry in parent.tensors:
        cuts = np.sort(rng.integers(0, len(entry.blocks) + 1, writers - 1)) * entry.block_bytes
        edges[entry.name] = [0, *np.minimum(cuts, entry.size_bytes).tolist(), entry.size_bytes]
    for writer in range(writers):
        mine = [part_of(blobs(tensors), edges, writer) for tensors in (old, new)]
        delta = difference(parent, *mine)
        assert delta is not None
        result, count = applied(result, delta), count + delta.changed
    assert same(result, new)
    whole = difference(parent, blobs(old), blobs(new))
    assert whole is not None
    assert count == whole.changed


def part_of(whole: dict[str, Blob], edges: dict[str, list[int]], writer: int) -> dict[str, Blob]:
    found = {}
    for name, blob in whole.items():
        start, stop = edges[name][writer : writer + 2]
        if start < stop:
            found[name] = replace(blob, data=blob.data[start:stop], start=start)
    return found


def test_no_delta_where_it_would_not_pay_or_not_lead_there() -> None:
    old = random_tensors()
    everything = {name: torch.bitwise_not(bits(t)).view(t.dtype).view(t.shape) for name, t in old.items()}
    large = difference(manifest_of(old), blobs(old), blobs(everything))
    assert large is not None
    assert (large.parts, large.changed) == ((), large.elements)
    assert difference(manifest_of(old), blobs(old), blobs(old | {"more": torch.zeros(1)})) is None
    assert difference(manifest_of(old), blobs(old), blobs(old | {"bf16": old["bf16"].view(torch.int16)})) is None
    other = changed(old, 0.01)
    assert difference(manifest_of(old), blobs(other), blobs(other)) is None  # not the bytes of the parent


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: b"",
        lambda d: d[:5],
        lambda d: d[:-1],
        lambda d: d + b"\0",
        lambda d: d[:8] + b"{" + d[9:],
        lambda d: d[:-3] + b"\x80" + d[-2:],  # the last gap has no end
    ],
)
def test_bytes_that_are_no_part(damage: Callable[[bytes], bytes]) -> None:
    old = {"w": torch.zeros(40, dtype=torch.bfloat16)}
    new = {"w": old["w"].clone()}
    new["w"][3] = 1
    delta = difference(manifest_of(old), blobs(old), blobs(new))
    assert delta is not None
    with pytest.raises(ValueError):
        list(decode(damage(delta.parts[0])))


# ---- copies of published versions


class Told:
    """The phases that a copy named."""

    def __init__(self) -> None:
        self.phases = list[str]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def take(self) -> list[str]:
        taken, self.phases = self.phases, []
        return taken


BY_DELTA, WHOLE = ["fetch", "fetch delta"], ["fetch"]


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(tmp_path / "exchange")


@pytest.fixture
def chain(exchange: DirectoryExchange, tmp_path: Path) -> list[Version]:
    """Six versions, each with its delta; the fourth changed everything."""
    tensors = {name: t for name, t in random_tensors().items() if name not in ("scalar", "u8")}
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, directory / "model.safetensors")
    versions = [import_model(exchange, "policy", directory)]
    for number in range(1, 6):
        version = Version("policy", number, f"c{number}")
        tensors = step(exchange, versions[-1], version, 1.0 if number == 4 else 0.02)
        versions.append(version)
    return versions


def step(exchange: DirectoryExchange, parent: Version, version: Version, share: float) -> Tensors:
    old = fetch(exchange, parent)
    new = changed(old, share, version.number)
    delta = difference(read_manifest(exchange, parent), blobs(old), blobs(new))
    assert delta is not None
    publish(exchange, version, tensors=new, state={}, trainer={}, model_files=None, parent=parent, delta=delta.parts)
    return new


def arrives(copy: LocalCopy, exchange: DirectoryExchange, version: Version, told: Told) -> list[str]:
    directory = copy.bring(exchange, version, told).directory
    expected = materialize(exchange, version, directory.parent.parent / "whole")
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert same(load_file(directory / "model.safetensors"), load_file(expected / "model.safetensors"))
    assert len(list(directory.parent.iterdir())) == 1
    return told.take()


def test_a_copy_follows_its_model(exchange: DirectoryExchange, chain: list[Version], tmp_path: Path) -> None:
    copy, told = LocalCopy(tmp_path / "copy"), Told()
    assert arrives(copy, exchange, chain[0], told) == WHOLE
    assert arrives(copy, exchange, chain[1], told) == BY_DELTA
    assert arrives(copy, exchange, chain[3], told) == BY_DELTA  # two at once
    assert arrives(copy, exchange, chain[3], told) == BY_DELTA  # held already: nothing to fetch
    assert arrives(copy, exchange, chain[5], told) == WHOLE  # the fourth has no delta
    assert arrives(copy, exchange, chain[2], told) == WHOLE  # back
    copy.drop()
    assert not (tmp_path / "copy").exists()
    assert arrives(copy, exchange, chain[3], told) == WHOLE


def test_only_the_delta_is_read(exchange: DirectoryExchange, chain: list[Version], tmp_path: Path) -> None:
    copy, told = LocalCopy(tmp_path / "copy"), Told()
    copy.bring(exchange, chain[0], told)
    manifest = read_manifest(exchange, chain[1])
    expected = fetch(exchange, chain[1])
    for key in manifest.keys() - {manifest_key(chain[1]), *(ref.key for ref in manifest.delta)}:
        exchange.delete(key)
    directory = copy.bring(exchange, chain[1], told).directory
    assert same(load_file(directory / "model.safetensors"), expected)


def test_what_is_gone_is_fetched_whole(exchange: DirectoryExchange, chain: list[Version], tmp_path: Path) -> None:
    copy, told = LocalCopy(tmp_path / "copy"), Told()
    copy.bring(exchange, chain[0], told)
    told.take()
    keep_only(exchange, "policy", [chain[2], chain[3]])
    with pytest.raises(NotFound):
        read_manifest(exchange, chain[1])
    assert arrives(copy, exchange, chain[2], told) == WHOLE  # the one between was pruned
    exchange.delete(read_manifest(exchange, chain[3]).delta[0].key)
    assert arrives(copy, exchange, chain[3], told) == BY_DELTA  # tried; what came is whole and right
    assert set(exchange.list(chain[2].prefix)) <= read_manifest(exchange, chain[2]).keys()


def test_an_altered_delta_is_refused(exchange: DirectoryExchange, chain: list[Version], tmp_path: Path) -> None:
    copy, told = LocalCopy(tmp_path / "copy"), Told()
    copy.bring(exchange, chain[0], told)
    (ref,) = read_manifest(exchange, chain[1]).delta
    data = bytearray(exchange.get(ref))
    data[-1] ^= 1
    exchange.put(ref.key, data)
    with pytest.raises(Corrupt, match=r"v000001"):
        copy.bring(exchange, chain[1], told)
    told.take()
    assert arrives(copy, exchange, chain[1], told) == WHOLE  # the next attempt


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"bf16": (0, 1)}, r"v000001\.c1, tensor 'bf16': its delta does not lead"),
        ({"bf17": (0, 1)}, r"v000001\.c1: its delta: tensor 'bf17': the version before has none of BF16"),
        ({"bf16": (10**6, 1)}, r"v000001\.c1: its delta: tensor 'bf16': it has no element 1000000"),
    ],
)
def test_a_delta_that_leads_elsewhere_is_refused(
    exchange: DirectoryExchange, chain: list[Version], tmp_path: Path, tensors: dict[str, tuple[int, int]], message: str
) -> None:
    """Its bytes are those that were published, but one thing too many is in it."""
    changes, data = [], b""
    for name, (position, value) in tensors.items():
        gaps = encode_gaps(np.array([position]))
        changes.append([name, "BF16", 0, 1, len(gaps)])
        data += gaps + np.uint16(value).tobytes()
    head = json.dumps(changes).encode()
    ref = exchange.put(f"{chain[1].prefix}delta-more", len(head).to_bytes(8, "little") + head + data)
    manifest = read_manifest(exchange, chain[1])
    exchange.put(manifest_key(chain[1]), replace(manifest, delta=(*manifest.delta, ref)).encode())
    copy, told = LocalCopy(tmp_path / "copy"), Told()
    copy.bring(exchange, chain[0], told)
    with pytest.raises(Corrupt, match=message):
        copy.bring(exchange, chain[1], told)
    told.take()
    assert arrives(copy, exchange, chain[1], told) == WHOLE


def test_a_copy_that_was_changed_is_not_built_on(
    exchange: DirectoryExchange, chain: list[Version], tmp_path: Path
) -> None:
    copy, told = LocalCopy(tmp_path / "copy"), Told()
    directory = copy.bring(exchange, chain[0], told).directory
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(Corrupt, match=r"v000001\.c1, tensor '\w+': its delta does not lead"):
        copy.bring(exchange, chain[1], told)


@pytest.mark.parametrize(
    "damage", [lambda d: (d / "model.safetensors").unlink(), lambda d: (d / "model.safetensors").write_bytes(b"short")]
)
def test_a_copy_that_somebody_deleted_is_fetched_again(
    exchange: DirectoryExchange, chain: list[Version], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    copy, told = LocalCopy(tmp_path / "copy"), Told()
    damage(copy.bring(exchange, chain[0], told).directory)
    told.take()
    assert arrives(copy, exchange, chain[1], told) == BY_DELTA  # tried; what came is whole and right
    assert not copy.altered


def test_only_copies_that_can_follow_are_kept(exchange: DirectoryExchange, tmp_path: Path) -> None:
    for name, dtype, kept in (("wide", torch.float32, False), ("narrow", torch.bfloat16, True)):
        version = Version(name, 1, "c")
        publish(
            exchange, version, tensors={"w": torch.zeros(3, dtype=dtype)}, state={}, trainer={},
            model_files={"config.json": b'{"model_type": "llama"}'}, parent=None,
        )  # fmt: skip
        copy = LocalCopy(tmp_path / name)
        directory = copy.bring(exchange, version, Told()).directory
        assert directory.is_dir()
        copy.settle()
        assert directory.is_dir() == kept


def test_of_two_publishers_the_losers_delta_goes(exchange: DirectoryExchange, chain: list[Version]) -> None:
    old, winner = fetch(exchange, chain[0]), read_manifest(exchange, chain[1])
    new = changed(old, 0.02, 99)
    delta = difference(read_manifest(exchange, chain[0]), blobs(old), blobs(new))
    assert delta is not None
    found = publish(
        exchange, chain[1], tensors=new, state={}, trainer={}, model_files=None, parent=chain[0], delta=delta.parts
    )
    assert found == winner
    assert set(exchange.list(chain[1].prefix)) <= winner.keys()
