"""Versions through a real exchange: exactly the bytes come back, or a message that names what is wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from functions.base.wire import Version
from functions.exchange.base import Corrupt, NotFound
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import checkpoint_tensors, load_causal_lm, save_model
from functions.weights.base import import_model
from functions.weights.blobs import Blob, publish_blobs
from functions.weights.manifest import Manifest, keep_only, manifest_key, read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import fetch, fetch_rows
from tests.support.versions import fetch_state, publish

V1 = Version("policy", 1, "aaaa")


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(tmp_path / "exchange")


def every_dtype() -> dict[str, Tensor]:
    torch.manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (7, 5), dtype=torch.int16)
    return {
        "bf16": bits.view(torch.bfloat16),  # every bit pattern, NaNs with payload and infinities too
        "f16": bits.view(torch.float16)[:3],
        "f32": torch.randn(3, 4, 2),
        "f64": torch.randn(5, dtype=torch.float64),
        "i64": torch.tensor(7),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "strided": torch.arange(6.0).reshape(2, 3).t(),
    }


def equal_bits(a: Tensor, b: Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


def put(exchange: DirectoryExchange, version: Version = V1, tensors: dict[str, Tensor] | None = None) -> Manifest:
    return publish(
        exchange,
        version,
        tensors=every_dtype() if tensors is None else tensors,
        state={"exp_avg/f32": torch.full((3, 4, 2), 0.5)},
        trainer={"optimizer_step": 3},
        model_files={"config.json": b"{}"},
        parent=None,
    )


def test_round_trip_is_bit_exact(exchange: DirectoryExchange) -> None:
    put(exchange)
    back = fetch(exchange, V1)
    assert back.keys() == every_dtype().keys()
    for name, tensor in every_dtype().items():
        assert equal_bits(back[name], tensor), name
    assert torch.equal(fetch_state(exchange, V1)["exp_avg/f32"], torch.full((3, 4, 2), 0.5))
    assert read_manifest(exchange, V1).trainer == {"optimizer_step": 3}
    back["f32"].add_(1)  # fetched tensors own their memory


def test_fetch_of_some_reads_only_their_bytes(exchange: DirectoryExchange) -> None:
    manifest = put(exchange)
    (entry,) = [e for e in manifest.tensors if e.name == "f32"]
    (key,) = {p.key for p in entry.pieces}
    data = bytearray(exchange.get(key))
    for other in manifest.tensors:
        if other.name != "f32" and other.pieces:
            data[other.pieces[0].start] ^= 1
    exchange.put(key, data)
    (read,) = fetch_rows(exchange, manifest, [(entry, 0, entry.rows)])
    assert equal_bits(read[1], every_dtype()["f32"])


@pytest.mark.parametrize("name", ["bf16", "i64", "exp_avg/f32"])
def test_one_altered_bit_is_refused_by_name(exchange: DirectoryExchange, name: str) -> None:
    manifest = put(exchange)
    (entry,) = [e for e in (*manifest.tensors, *manifest.state) if e.name == name]
    piece = entry.pieces[0]
    data = bytearray(exchange.get(piece.key))
    data[piece.start + piece.length - 1] ^= 0x10
    exchange.put(piece.key, data)
    with pytest.raises(Corrupt, match=rf"policy v000001\.aaaa, tensor '{name}'"):
        (fetch_state if name in {e.name for e in manifest.state} else fetch)(exchange, V1)


def test_truncated_or_deleted_shards_are_refused(exchange: DirectoryExchange) -> None:
    manifest = put(exchange)
    key = manifest.tensors[0].pieces[0].key
    exchange.put(key, exchange.get(key)[:-40])
    with pytest.raises(Corrupt, match="truncated"):
        fetch_state(exchange, V1)
    exchange.delete(key)
    with pytest.raises(Corrupt, match="gone"):
        fetch(exchange, V1)


def test_half_published_version_is_not_found(exchange: DirectoryExchange) -> None:
    put(exchange)
    exchange.delete(manifest_key(V1))  # what a publisher leaves that dies before its last put
    with pytest.raises(NotFound, match="never"):
        fetch(exchange, V1)
    put(exchange)  # the next attempt publishes over what is left
    assert fetch(exchange, V1).keys() == every_dtype().keys()


def test_manifest_under_another_version_is_refused(exchange: DirectoryExchange) -> None:
    put(exchange)
    other = Version("policy", 2, "bbbb")
    exchange.put(manifest_key(other), exchange.get(manifest_key(V1)))
    with pytest.raises(Corrupt, match=r"v000002\.bbbb.*that of policy v000001"):
        read_manifest(exchange, other)


def test_of_many_publishers_one_wins_and_the_version_is_whole(exchange: DirectoryExchange) -> None:
    barrier, results = threading.Barrier(6), list[Manifest]()

    def attempt(number: int) -> None:
        barrier.wait()
        tensors = {"w": torch.full((64, 64), float(number)), "b": torch.full((8,), float(number))}
        results.append(put(exchange, tensors=tensors))

    threads = [threading.Thread(target=attempt, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({m.encode() for m in results}) == 1  # everybody got the winner's
    back = fetch(exchange, V1)
    assert bool((back["w"] == back["w"][0, 0]).all())
    assert torch.equal(back["b"], back["w"][0, :8])
    assert set(exchange.list(V1.prefix)) == results[0].keys()  # nothing of the losers is left


def test_tensors_above_the_shard_limit_are_cut(exchange: DirectoryExchange) -> None:
    torch.manual_seed(0)
    data = {
        name: torch.randint(0, 256, (size,), dtype=torch.uint8)
        for name, size in zip("abcd", (10, 300, 64, 7), strict=True)
    }
    blobs = {name: Blob("U8", tuple(t.shape), t.numpy().data) for name, t in data.items()}
    manifest = publish_blobs(exchange, V1, tensors=blobs, state={}, trainer={}, files={}, parent=None, shard_bytes=64)
    assert max(len(exchange.get(p.key)) for e in manifest.tensors for p in e.pieces) <= 64
    back = fetch(exchange, V1)
    assert all(torch.equal(back[name], data[name]) for name in data)


def test_keep_only_leaves_the_kept_and_what_they_need(exchange: DirectoryExchange, tiny: Path) -> None:
    base = import_model(exchange, "policy", tiny)
    chain = [base]
    for number in range(1, 5):
        version = Version("policy", number, f"c{number}")
        publish(
            exchange, version, tensors=fetch(exchange, base), state={}, trainer={}, model_files=None, parent=chain[-1]
        )
        chain.append(version)
    import_model(exchange, "critic", tiny)
    keep_only(exchange, "policy", [chain[3]])
    for gone in chain[:3]:
        with pytest.raises(NotFound):
            read_manifest(exchange, gone)
    materialize(exchange, chain[3], tiny.parent / "kept")  # its config.json lies under version 0
    assert load_causal_lm(tiny.parent / "kept").config.model_type == "llama"
    read_manifest(exchange, chain[4])  # newer than the kept: may be in the making
    read_manifest(exchange, Version("critic", 0))
    assert keep_only(exchange, "policy", [chain[3]]) == 0


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    directory = tmp_path / "tiny"
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)
    save_model(model, directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_import_then_materialize_gives_the_same_model(exchange: DirectoryExchange, tiny: Path) -> None:
    version = import_model(exchange, "policy", tiny)
    assert version == Version("policy", 0, "base")
    assert import_model(exchange, "policy", tiny) == version
    copy = materialize(exchange, version, tiny.parent / "copy")
    assert (copy / "tokenizer.json").read_text() == "{}"
    one, two = (load_causal_lm(d, dtype=torch.bfloat16) for d in (tiny, copy))
    tokens = torch.arange(12)[None]
    assert torch.equal(one(tokens).logits, two(tokens).logits)
    assert fetch(exchange, version).keys() == checkpoint_tensors(one).keys()  # the tied head is stored once
    for name, tensor in checkpoint_tensors(one).items():
        assert equal_bits(fetch(exchange, version)[name], tensor)


def test_import_reads_sharded_directories(exchange: DirectoryExchange, tiny: Path, tmp_path: Path) -> None:
    whole = load_causal_lm(tiny, dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    version = import_model(exchange, "sharded", tmp_path / "sharded")
    copy = load_causal_lm(materialize(exchange, version, tmp_path / "copy"), dtype=torch.bfloat16)
    assert all(equal_bits(a, b) for a, b in zip(whole.parameters(), copy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "not JSON"),
        (lambda d: (d / "config.json").write_text("{}"), "no model_type"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "save the model as safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"abc"), "not a safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]), "truncated"),
    ],
)  # fmt: skip
def test_a_directory_that_is_no_model(exchange: DirectoryExchange, tiny: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(tiny)
    with pytest.raises(ValueError, match=message) as caught:
        import_model(exchange, "policy", tiny)
    assert str(tiny) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not exchange.list("weights/")


def test_import_and_materialize_do_without_torch(tmp_path: Path, tiny: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from functions.exchange.directory import DirectoryExchange\n"
        "from functions.weights.base import import_model; from functions.weights.materialize import materialize\n"
        f"e = DirectoryExchange(Path({str(tmp_path / 'x')!r}))\n"
        f"materialize(e, import_model(e, 'policy', Path({str(tiny)!r})), Path({str(tmp_path / 'out')!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
