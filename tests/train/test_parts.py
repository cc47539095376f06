"""Each rank of a gang reads and writes its own part: the version is the same whoever wrote it, and whoever dies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from functions.base.wire import Json, Version
from functions.call.parallel import Parallel
from functions.exchange.base import Corrupt, NotFound
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import save_model
from functions.train.parts import rows_of, transfers
from functions.weights.base import import_model
from functions.weights.manifest import Manifest, TensorEntry, block_bytes, keep_only, read_manifest
from functions.weights.store import fetch, fetch_rows
from tests.support.architectures import tiny_model
from tests.support.gang import Moved, Republish, run_republish
from tests.support.versions import fetch_state, publish

pytestmark = pytest.mark.timeout(300)
WORDS, WIDTH = 20001, 32
"""Rows of the embedding: forty blocks in float32, and no number of ranks divides them into whole ones."""
PARAMS: Json = {"optimizer": {"lr": 1e-2}, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Store:
    root: Path
    exchange: DirectoryExchange
    first: Version
    """Written by one."""

    def manifest(self, version: Version) -> Manifest:
        return read_manifest(self.exchange, version)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A model with masters and moments as a bfloat16 job has them."""
    path = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    save_model(model, path / "model")
    exchange = DirectoryExchange(path / "exchange")
    base = import_model(exchange, "policy", path / "model")
    return Store(path / "exchange", exchange, publish_random(exchange, base, Version("policy", 1, "one"), model))


def publish_random(exchange: DirectoryExchange, base: Version, version: Version, model: LlamaForCausalLM) -> Version:
    masters = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    state = {f"{kind}/{name}": torch.rand(p.shape) for kind in ("exp_avg", "exp_avg_sq") for name, p in masters.items()}
    publish(
        exchange,
        version,
        tensors={name: tensor.to(torch.bfloat16) for name, tensor in masters.items()},
        state=state | {f"master/{name}": tensor for name, tensor in masters.items()},
        trainer={"optimizer_steps": 3, "carry": {"kl_coef": 0.5}, "result": {}},
        model_files=None,
        parent=base,
    )
    return version


def content(manifest: Manifest) -> list[object]:
    """All of a version but where its bytes lie."""
    return [sorted((e.name, e.dtype, e.shape, e.blocks) for e in kind) for kind in (manifest.tensors, manifest.state)]


def gang(source: Version, size: int, call: str, number: int = 2, **more: object) -> Republish:
    return Republish(source, Version("policy", number, call), PARAMS, size, f"{call}-{size}", **more)  # type: ignore[arg-type]


def shards(moved: dict[str, int]) -> int:
    return sum(size for key, size in moved.items() if "/shard-" in key)


def edges(entry: TensorEntry, rank: int, size: int) -> tuple[int, int]:
    """The bytes of the rank's rows, by torch's own dealing."""
    chunks = torch.arange(entry.shape[0]).chunk(size)
    rows = chunks[rank] if rank < len(chunks) else torch.empty(0)
    row_bytes = entry.size_bytes // entry.shape[0]
    low = int(rows[0]) * row_bytes if len(rows) else entry.size_bytes
    return low, low + len(rows) * row_bytes


def to_read(entry: TensorEntry, rank: int, size: int) -> int:
    low, high = edges(entry, rank, size)
    if low == high:
        return 0
    step = entry.block_bytes
    return min(entry.size_bytes, -(-high // step) * step) - low // step * step


def to_write(entry: TensorEntry, rank: int, size: int) -> int:
    low, high = edges(entry, rank, size)
    begins = [at for at in range(0, entry.size_bytes, entry.block_bytes) if low <= at < high]
    return sum(min(entry.block_bytes, entry.size_bytes - at) for at in begins)


def test_any_number_of_ranks_writes_the_same_version_and_reads_any_others(store: Store) -> None:
    """Written by one, by four, and by one, two and three who read what four wrote; what each rank moves is exact."""
    one = store.manifest(store.first)
    four = gang(store.first, 4, "four")
    (moved,) = run_republish(store.root, [four])
    check_moved(one, store.manifest(four.version), moved)
    again = [gang(four.version, size, f"again{size}", 3) for size in (1, 2, 3)]
    for asked, moved in zip(again, run_republish(store.root, again), strict=True):
        check_moved(store.manifest(four.version), store.manifest(asked.version), moved)
    for version in (four.version, *(asked.version for asked in again)):
        made = store.manifest(version)
        assert content(made) == content(one)
        assert made.trainer["optimizer_steps"] == 3
        assert made.trainer["carry"] == {"kl_coef": 0.5}
        assert set(store.exchange.list(version.prefix)) <= made.keys()
    (embedding,) = [e for e in store.manifest(four.version).state if e.name == "master/model.embed_tokens.weight"]
    assert len({piece.key for piece in embedding.pieces}) == 4


def test_any_mesh_writes_the_same_version_and_reads_any_others(store: Store) -> None:
    """Written by tp, and by tp within dp, each from what another wrote: all of it once, each rank about its share."""
    source, one = store.first, store.manifest(store.first)
    every = [*one.tensors, *one.state]
    total, blocks = sum(e.size_bytes for e in one.state), sum(e.block_bytes for e in one.state)
    for number, (size, tp) in enumerate(((2, 2), (4, 2), (3, 1)), 2):
        asked = gang(source, size, f"tp{tp}of{size}", number, parallel=Parallel(tp=tp))
        (moved,) = run_republish(store.root, [asked])
        assert [own.error for own in moved if own] == [""] * size
        assert sum(shards(own.written) for own in moved if own) == sum(e.size_bytes for e in every)
        for own in moved:
            assert own is not None
            assert shards(own.read) <= total / size + 2 * blocks
        source = asked.version
        assert content(store.manifest(source)) == content(one)


def check_moved(source: Manifest, made: Manifest, moved: list[Moved | None]) -> None:
    size = len(moved)
    for rank, own in enumerate(moved):
        assert own is not None
        assert own.error == ""
        weights = sum(e.size_bytes for e in source.tensors) if size == 1 else 0  # a gang's masters are in the state
        assert shards(own.read) == sum(to_read(e, rank, size) for e in source.state) + weights
        assert shards(own.written) == sum(to_write(e, rank, size) for e in (*made.tensors, *made.state))
    assert sum(shards(own.written) for own in moved if own) == sum(e.size_bytes for e in (*made.tensors, *made.state))


@pytest.mark.parametrize("seed", range(30))
def test_parts_are_the_whole_tensor_once(seed: int) -> None:
    """Rows of any size dealt to any number of ranks: what the ranks write end to end is the tensor, in whole blocks."""
    dice = random.Random(seed)
    count, size = dice.choice([1, 2, 7, 100, 4097]), dice.randint(1, 9)
    row_bytes = dice.choice([1, 3, 4096, 2**19, 2**20, 2**20 + 5, 3 * 2**20])
    step = block_bytes(count * row_bytes)
    edges = [(low * row_bytes, high * row_bytes) for low, high in rows_of(count, size)]
    chunks = torch.arange(count).chunk(size)
    assert [len(c) for c in chunks] == [high - low for low, high in rows_of(count, size) if high > low]
    moves = transfers(dict(enumerate(edges)))
    at = 0
    for rank, (low, high) in enumerate(edges):
        start = min(-(-low // step) * step, high)
        own = [(start, high)] + [(move.start, move.stop) for move in moves if move.target == rank]
        if all(begin == end for begin, end in own):
            continue
        assert start == at
        assert start % step == 0
        for begin, end in own:
            assert begin == at
            at = end
    assert at == count * row_bytes


@pytest.fixture(scope="module")
def broken(store: Store) -> Version:
    """Written by four, to be broken and mended."""
    asked = gang(store.first, 4, "broken")
    run_republish(store.root, [asked])
    return asked.version


@pytest.mark.parametrize("rank", range(4))
def test_an_altered_byte_of_any_ranks_part_is_named(store: Store, broken: Version, rank: int) -> None:
    """Whoever reads the block is told which tensor and which shard; who does not is not."""
    manifest = store.manifest(broken)
    name = "exp_avg_sq/model.embed_tokens.weight"
    (entry,) = [e for e in manifest.state if e.name == name]
    number = min(rank, len(entry.pieces) - 1)
    piece = entry.pieces[number]
    kept = store.exchange.get(piece.key)
    data = bytearray(kept)
    data[piece.start + piece.length // 2] ^= 4
    store.exchange.put(piece.key, data)
    with pytest.raises(Corrupt, match=rf"policy v000002\.broken, tensor '{name}': bytes .* in {piece.key}, are"):
        fetch_state(store.exchange, broken)
    touched = set()
    for size in (1, 3, 6):
        for reader in range(size):
            low, high = edges(entry, reader, size)
            begin = sum(p.length for p in entry.pieces[:number]) + piece.length // 2
            begin = begin // entry.block_bytes * entry.block_bytes
            meets = low < begin + entry.block_bytes and begin < high
            touched.add(meets)
            if meets:
                with pytest.raises(Corrupt, match=piece.key):
                    list(fetch_rows(store.exchange, manifest, [(entry, low // 128, high // 128)]))
            else:
                ((_, own),) = fetch_rows(store.exchange, manifest, [(entry, low // 128, high // 128)])
                assert torch.equal(own, whole(store, store.first, name)[low // 128 : high // 128])
    assert touched == {True, False}
    store.exchange.put(piece.key, kept)
    fetch_state(store.exchange, broken)


def whole(store: Store, version: Version, name: str) -> Tensor:
    return fetch_state(store.exchange, version, [name])[name]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_dies_leaves_nothing_that_counts(store: Store, when: str) -> None:
    """Killed before or after its shard is there: no version, and the next attempt makes it."""
    doomed = gang(store.first, 2, f"doomed-{when}", die=(1, when))
    ((survivor, killed),) = run_republish(store.root, [doomed])
    assert killed is None
    assert survivor is not None
    assert survivor.error.startswith("RetryableError")
    with pytest.raises(NotFound):
        store.manifest(doomed.version)
    left = set(store.exchange.list(doomed.version.prefix))
    assert len(left) >= (2 if when == "after" else 1)  # what was put lies there, and is nobody's
    again = gang(store.first, 3, f"doomed-{when}")
    run_republish(store.root, [again])
    made = store.manifest(again.version)
    assert content(made) == content(store.manifest(store.first))
    keep_only(store.exchange, "policy", [Version("policy", 0), store.first, made.version])
    assert set(store.exchange.list(doomed.version.prefix)) <= made.keys()


def test_of_two_gangs_one_wins_and_the_losers_parts_are_gone(store: Store) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM.from_pretrained(store.root.parent / "model")
    other = publish_random(store.exchange, Version("policy", 0), Version("policy", 1, "other"), model)
    version = Version("policy", 2, "raced")
    racing = [
        Republish(source, version, PARAMS, size, f"race{size}", note=source.call)
        for source, size in ((store.first, 2), (other, 3))
    ]
    ended = run_republish(store.root, racing)
    assert all(own is not None and own.error == "" for ranks in ended for own in ranks)
    made = store.manifest(version)
    winner = made.trainer["result"]["note"]
    assert content(made) == content(store.manifest(Version("policy", 1, winner)))
    assert set(store.exchange.list(version.prefix)) <= made.keys()


@pytest.mark.parametrize(("kind", "lora"), [("qwen3_moe", None), ("qwen3", None), ("qwen3", {"rank": 2, "alpha": 4.0})])
def test_float32_models_and_adapters_of_any_form(kind: str, lora: Json | None, tmp_path: Path) -> None:
    """Weights without masters are read and written in rows too; experts, which are stored apart, by rank 0."""
    exchange = DirectoryExchange(tmp_path / "exchange")
    base = import_model(exchange, "policy", tiny_model(kind, tmp_path / "model"))
    params: Json = {"optimizer": {"lr": 1e-2}, "lora": lora}
    one, two = Version("policy", 1, "alone"), Version("policy", 1, "two")
    sizes = ((one, 1), (two, 2))
    run_republish(
        tmp_path / "exchange", [Republish(base, version, params, size, f"{version.call}") for version, size in sizes]
    )
    alone, both = (read_manifest(exchange, version) for version in (one, two))
    assert content(both) == content(alone)
    assert [e.name for e in both.tensors] == [e.name for e in alone.tensors]
    assert (both.adapter is not None) == (lora is not None)
    if lora is None:
        assert content(both) == content(read_manifest(exchange, base))
        assert fetch(exchange, two).keys() == fetch(exchange, base).keys()
