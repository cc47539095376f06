"""A replica of several ranks: each reads its slices of a version, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from functions.base.wire import Version
from functions.call.function import Context, ReplicaBroken
from functions.exchange.open import open_exchange
from functions.generate.engine.base import Sampling
from functions.generate.engines import EngineOptions
from functions.generate.policy import HeldPolicy
from functions.generate.vllm.engine import VllmEngine
from functions.weights.base import import_model
from functions.weights.delta import difference
from functions.weights.manifest import read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import blobs, fetch
from tests.support.versions import publish
from tests.vllm.samples import Logprobs, random_prompts, requests, run

pytestmark = pytest.mark.vllm

WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 256}
"""Halves of whose matrices, in bfloat16, begin and end with blocks."""


def test_ranks_read_their_slices_alone(make_model: Callable[..., Path], logprobs: Logprobs, tmp_path: Path) -> None:
    """Two ranks; a first version, one that comes as a delta, a whole one in place, and one whose bytes were altered."""
    place = str(tmp_path / "exchange"), "job"
    exchange = open_exchange(*place)
    parent = import_model(exchange, "policy", make_model(90, **WIDE))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in fetch(exchange, parent).items()}
    policy = HeldPolicy(
        "vllm", EngineOptions(torch.float32, torch.device("cpu"), 8, False, {"gpus": 2, "context": 512})
    )
    delta: tuple[bytes, ...] = ()
    wanted, engines = requests(random_prompts(0, [60]), 2), set()
    half = sum(t.nbytes for t in tensors.values() if t.ndim == 2) // 2
    alike = sum(t.nbytes for t in tensors.values() if t.ndim == 1)
    for number in range(1, 5):
        version = Version("policy", number, "call")
        manifest = publish(
            exchange, version, tensors=tensors, state={}, trainer={}, model_files=None, parent=parent, delta=delta
        )
        context = Context(exchange, str(tmp_path / "scratch"), opened=place)
        if number == 4:
            file = next(p for p in (tmp_path / "exchange").rglob("shard-*") if "v000004" in str(p))
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                opened.write(b"altered!")
            with pytest.raises(ReplicaBroken, match=r"could not be applied in place.*v000004.call, tensor"):
                policy.hold(version, context)
            break
        engine, _ = policy.hold(version, context)
        assert isinstance(engine, VllmEngine)
        engines.add(engine.held())
        read = [] if number == 2 else [half + alike] * 2
        assert engine.read_bytes == read
        assert context.meter.bytes_in == sum(read), "the exchange here is the plain one: what ranks say is added"
        (directory,) = (path for path in (tmp_path / "scratch" / "policy").iterdir())
        assert sum(os.stat(file).st_blocks * 512 for file in directory.glob("*.safetensors")) < half // 8
        found = run(engine, wanted, Sampling(32, seed=4, ignore_eos=True))
        whole = materialize(exchange, version, tmp_path / "whole" / str(number))
        for request in wanted:
            own = torch.tensor(found[request.number].logprobs)
            assert float((own - logprobs(whole, request, found[request.number], 1.0)).abs().max()) < 2e-5
        old, parent = tensors, version
        share = 0.05 if number == 1 else 1.0
        tensors = {n: torch.where(torch.rand(t.shape) < share, t * 1.1 + 0.05, t) for n, t in old.items()}
        change = difference(manifest, blobs(old), blobs(tensors))
        assert change is not None
        delta = change.parts
        assert bool(delta) == (number == 1)
    assert len(engines) == 1
    assert read_manifest(exchange, parent).delta == ()
    engine.close()


def test_what_a_loader_copies_is_what_is_read() -> None:
    """Of three ranks' place 1: rows of two parts of a fused matrix, columns, and all where it computes with them."""
    from functions.generate.vllm.slices import Slices, Traced
    from functions.weights.manifest import TensorEntry

    shapes = {"fused": (12, 6), "columns": (4, 6), "whole": (2, 3), "skipped": (2, 2), "none": (6,)}
    entries = {name: TensorEntry(name, "F32", shape, (), ()) for name, shape in shapes.items()}
    traced, destination = Traced(), torch.zeros(2, 6)
    with traced:
        for name, tensor in traced.over((name, torch.empty(shape)) for name, shape in shapes.items()):
            if name == "fused":
                destination.copy_(tensor.narrow(0, 2, 2))
                destination[:] = tensor[8:10]
            elif name == "columns":
                torch.zeros(4, 2).copy_(tensor.narrow(1, 2, 2))
            elif name == "whole":
                torch.zeros(4, 3).copy_(torch.cat([tensor, tensor]))
            elif name == "none":
                torch.zeros(2).copy_(tensor[2:4])
    assert not destination.any()
    assert traced.slices(entries, 1, 3) == {
        "fused": Slices(((12, 24), (48, 60))),
        "columns": Slices((), (2, 4)),
        "whole": Slices(((0, 6),)),
        "none": Slices(((2, 4),)),
    }
