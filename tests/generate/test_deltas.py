"""Replicas that are kept fetch what changed, and sample what a replica that fetches everything samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from functions.base.samples import SampleBatch
from functions.base.wire import Call, Version
from functions.call.function import Context
from functions.exchange.base import Corrupt
from functions.exchange.directory import DirectoryExchange
from functions.generate.function import GenerateFunction
from functions.models.pretrained import load_causal_lm, save_model
from functions.weights.base import import_model
from functions.weights.delta import difference
from functions.weights.manifest import manifest_key, read_manifest
from functions.weights.store import blobs, fetch
from tests.support.versions import publish


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(tmp_path / "exchange")


@pytest.fixture
def versions(exchange: DirectoryExchange, model_dir: Callable[[str], Path], tmp_path: Path) -> list[Version]:
    """Of a bfloat16 model whose output changes with each version, although few of its weights do."""
    model = load_causal_lm(model_dir("llama-tied-rope3"), dtype=torch.bfloat16)
    save_model(model, tmp_path / "narrow")
    found = [import_model(exchange, "actor", tmp_path / "narrow")]
    for number in range(1, 4):
        old = fetch(exchange, found[-1])
        new = {name: _moved(tensor, number) for name, tensor in old.items()}
        delta = difference(read_manifest(exchange, found[-1]), blobs(old), blobs(new))
        assert delta is not None
        assert delta.parts
        found.append(Version("actor", number, f"c{number}"))
        publish(
            exchange, found[-1], tensors=new, state={}, trainer={}, model_files=None, parent=found[-2],
            delta=delta.parts,
        )  # fmt: skip
    return found


def _moved(tensor: Tensor, seed: int) -> Tensor:
    chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < 0.05
    return torch.where(chosen, tensor * 3 + 0.25, tensor)


class Replica:
    def __init__(self, exchange: DirectoryExchange, scratch: Path, engine: str, dtype: str) -> None:
        self.exchange, self.scratch = exchange, scratch
        self.function = GenerateFunction(engine=engine, dtype=dtype, slots=8, deterministic=True)
        self.phases = list[str]()

    def samples(self, version: Version) -> bytes:
        prompts = [np.arange(3, 9).tolist(), [5, 6]]
        batch = SampleBatch.of_prompts(prompts, samples_per_prompt=3, version=version.number)
        ref = self.exchange.put("batches/one", batch.encode())
        call = Call("c", "generate", {"samples": [ref]}, {"policy": version}, {"max_response_length": 12})
        context = Context(self.exchange, str(self.scratch))
        events = list(self.function.call(call, context))
        self.phases = [span.name for span in context.meter.spans if span.name in ("fetch", "fetch delta", "load")]
        parts = [SampleBatch.decode(self.exchange.get(event.ref)) for event in events if event.ref is not None]
        return SampleBatch.concat(parts).in_order().encode()


@pytest.mark.parametrize(
    ("engine", "dtype"), [("torch", "float32"), ("torch", "bfloat16"), ("transformers", "bfloat16")]
)
def test_a_kept_replica_samples_what_a_new_one_does(
    exchange: DirectoryExchange, versions: list[Version], tmp_path: Path, engine: str, dtype: str
) -> None:
    kept, seen = Replica(exchange, tmp_path / "kept", engine, dtype), set[bytes]()
    for number, version in enumerate((versions[0], versions[1], versions[3])):
        new = Replica(exchange, tmp_path / f"new-{number}", engine, dtype)
        expected = new.samples(version)
        assert kept.samples(version) == expected
        assert new.phases == ["fetch", "load"]
        assert kept.phases == (["fetch", "fetch delta", "load"] if number else ["fetch", "load"])
        seen.add(expected)
    assert len(seen) == 3  # each version samples otherwise: an old one could not pass for it
    assert kept.samples(versions[3]) == expected
    assert kept.phases == []  # held


@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_after_a_wrong_delta_nothing_half_new_is_sampled_from(
    exchange: DirectoryExchange, versions: list[Version], tmp_path: Path, engine: str
) -> None:
    """The delta of another version, applied to the files that a CPU engine may have mapped."""
    kept = Replica(exchange, tmp_path / "kept", engine, "bfloat16")
    before = kept.samples(versions[0])
    manifest = read_manifest(exchange, versions[1])
    wrong = replace(manifest, delta=read_manifest(exchange, versions[3]).delta)
    exchange.put(manifest_key(versions[1]), wrong.encode())
    with pytest.raises(Corrupt, match=r"actor v000001\.c1, tensor '.*': its delta does not lead"):
        kept.samples(versions[1])
    assert kept.samples(versions[0]) == before
    with pytest.raises(Corrupt):
        kept.samples(versions[1])  # by its delta again
    assert kept.samples(versions[1]) == Replica(exchange, tmp_path / "new", engine, "bfloat16").samples(versions[1])
