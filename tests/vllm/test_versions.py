"""New versions in place, adapters, stale weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from functions.base.wire import Version
from functions.call.function import FatalError, ReplicaBroken
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.vllm.engine import VllmEngine
from functions.weights.delta import difference
from functions.weights.local_copy import Changes
from functions.weights.manifest import Manifest, TensorEntry, block_hashes
from functions.weights.store import blobs
from tests.vllm.samples import Logprobs, random_prompts, requests, run

pytestmark = pytest.mark.vllm

SAMPLING = Sampling(32, seed=4, ignore_eos=True)
BOUND = 1e-5


def worst(logprobs: Logprobs, model: Path, wanted: Sequence[Request], found: dict[int, Sample]) -> float:
    return max(
        float((torch.tensor(found[r.number].logprobs) - logprobs(model, r, found[r.number], 1.0)).abs().max())
        for r in wanted
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_version_is_applied_in_place(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], logprobs: Logprobs, tied: bool
) -> None:
    """Prompts of several cache blocks, generated again after each update: neither a weight, nor a tied output head,
    nor a cached prefix of the version before may be left."""
    models = [make_model(seed, tie_word_embeddings=tied) for seed in (20, 21, 22)]
    wanted = requests(random_prompts(0, [300, 20]), 2)
    engine, cores = make_engine(), set()
    for number, model in enumerate(models):
        engine.load(Version("policy", number), model)
        cores.add(id(engine._engine))
        found = run(engine, wanted, SAMPLING)
        assert worst(logprobs, model, wanted, found) <= BOUND
        assert worst(logprobs, models[number - 1], wanted, found) > 0.1
        assert {sample.version for sample in found.values()} == {number}
    assert len(cores) == 1, "an update started a new engine"
    engine.load(Version("policy", 2), Path("/nowhere"))  # held already


def changed(model: Path, to: Path, value: float | None = None) -> tuple[bytes, ...]:
    """A copy of `model` in `to` with a few weights changed (one of them to `value`), and the delta."""
    shutil.copytree(model, to)
    old = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    new = {n: torch.where(torch.rand(t.shape, generator=generator) < 0.05, t * 2 + 0.05, t) for n, t in old.items()}
    if value is not None:
        new["model.layers.0.mlp.up_proj.weight"][0, 0] = value
    save_file(new, to / "model.safetensors", metadata={"format": "pt"})
    entries = [
        TensorEntry(name, blob.dtype, blob.shape, (), block_hashes(blob.data)) for name, blob in blobs(old).items()
    ]
    delta = difference(Manifest(Version("policy", 0), None, tuple(entries)), blobs(old), blobs(new))
    assert delta is not None
    assert delta.parts
    return delta.parts


def patched(engine: VllmEngine, model: Path, *deltas: tuple[bytes, ...]) -> bool:
    """What the engine does on a GPU."""
    assert engine._engine is not None
    (done,) = engine._engine.collective_rpc("rlhf_patch", args=(str(model), deltas))
    engine.forget_prefixes()
    return bool(done)


@pytest.mark.parametrize("tied", [False, True])
def test_a_delta_is_applied_to_the_weights_in_place(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], logprobs: Logprobs, tied: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    models = [make_model(40, tie_word_embeddings=tied), tmp_path / "1", tmp_path / "2"]
    deltas = [changed(before, after) for before, after in pairwise(models)]
    engine, wanted = make_engine(), requests(random_prompts(0, [300, 20]), 2)
    engine.load(Version("policy", 0), models[0])
    assert worst(logprobs, models[0], wanted, run(engine, wanted, SAMPLING)) <= BOUND
    assert patched(engine, models[2], *deltas)
    found = run(engine, wanted, SAMPLING)
    assert worst(logprobs, models[2], wanted, found) <= 5 * BOUND  # its weights are larger, and so is rounding
    assert worst(logprobs, models[1], wanted, found) > 0.1
    engine.load(Version("policy", 2), models[2])  # the same weights from files: the same bits
    for number, sample in run(engine, wanted, SAMPLING).items():
        assert np.array_equal(sample.response, found[number].response)
        assert np.array_equal(sample.logprobs, found[number].logprobs)


def test_a_delta_that_vllm_cannot_apply_wants_the_files(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], logprobs: Logprobs, tmp_path: Path
) -> None:
    """A NaN is vLLM's sign for "unchanged"."""
    before, after, engine, wanted = make_model(41), tmp_path / "after", make_engine(), requests([[5, 6, 7]])
    changed(before, after)
    engine.load(Version("policy", 0), before)
    assert not patched(engine, tmp_path / "nan", changed(before, tmp_path / "nan", float("nan")))
    changes = Changes(Version("policy", 0), (changed(before, tmp_path / "again"),))
    engine.load(Version("policy", 1), after, changes)
    assert worst(logprobs, after, wanted, run(engine, wanted, SAMPLING)) <= BOUND


def test_a_delta_on_other_weights_is_noticed(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """One that changes nothing, on weights of which a twentieth are others; then the right ones, forth and back."""
    before, engine = make_model(42), make_engine()
    first = changed(before, tmp_path / "1")
    second = changed(tmp_path / "1", tmp_path / "2")
    engine.load(Version("policy", 0), before)
    assert not patched(engine, tmp_path / "2", second[:0])
    engine.load(Version("policy", 1), tmp_path / "1")
    assert patched(engine, tmp_path / "2", second)
    assert patched(engine, tmp_path / "1", first)


def test_another_architecture_starts_another_engine(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], logprobs: Logprobs
) -> None:
    engine, wanted = make_engine(), requests(random_prompts(1, [20]))
    for number, layers in enumerate((1, 2)):
        model = make_model(number, num_hidden_layers=layers)
        engine.load(Version("policy", number), model)
        assert worst(logprobs, model, wanted, run(engine, wanted, SAMPLING)) <= BOUND


def test_a_failed_update_breaks_the_replica(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A second weight file that cannot be read: vLLM has applied the first one by then."""
    engine = make_engine()
    engine.load(Version("policy", 0), make_model(30))
    half = tmp_path / "half"
    shutil.copytree(make_model(31), half)
    (half / "more.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ReplicaBroken, match="could not be applied in place"):
        engine.load(Version("policy", 1), half)
    with pytest.raises(ValueError, match="the engine holds no policy"):
        run(engine, requests([[5]]), SAMPLING)


def test_stale_weights_are_caught_by_the_trainer(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The engine says version 1 and still holds version 0: the train function refuses its samples and names it."""
    from functions.base.samples import Columns, Ragged, SampleBatch
    from functions.base.wire import Call
    from functions.call.function import Context
    from functions.exchange.directory import DirectoryExchange
    from functions.train.function import TrainFunction
    from functions.weights.base import import_model

    old, new = make_model(40), make_model(41)
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", new)
    wanted = requests(random_prompts(2, [12, 20]), 4)
    engine = make_engine()

    def train(name: str) -> None:
        found = run(engine, wanted, SAMPLING)
        samples = [found[r.number] for r in wanted]
        batch = SampleBatch(
            prompts=Ragged.from_rows([r.prompt for r in wanted[::4]], np.int32),
            prompt=np.array([r.group for r in wanted], np.int32),
            group=np.array([r.group for r in wanted], np.int32),
            index=np.array([r.index for r in wanted], np.int32),
            responses=Ragged.from_rows([s.response for s in samples], np.int32),
            logprobs=np.concatenate([s.logprobs for s in samples]),
            mask=np.ones(sum(len(s.response) for s in samples), np.float32),
            finish=np.array([s.finish for s in samples], np.int32),
            version=np.array([s.version for s in samples], np.int32),
        )
        scores = Columns.of(batch, sample={"score": np.arange(8, dtype=np.float32) % 3})
        call = Call(
            name,
            "train",
            inputs={
                "samples": [exchange.put(f"batches/{name}", batch.encode())],
                "columns": [exchange.put(f"batches/{name}.scores", scores.encode())],
            },
            weights={"policy": version},
            params={"max_rollout_logprob_diff": 1e-3},
        )
        list(TrainFunction(device="cpu").call(call, Context(exchange, str(tmp_path))))

    engine.load(Version("policy", 0), old)
    engine._version = version = Version("policy", 0)  # the fault: nothing was loaded
    with pytest.raises(FatalError, match=r"the samples say that version 0 made them: stale weights\?"):
        train("stale")
    engine._version = None
    engine.load(version, new)
    train("fresh")


# --- adapters --------------------------------------------------------------------------------------------------------


def make_adapter(directory: Path, base: Path, seed: int, *, rank: int = 8, width: int | None = None) -> Path:
    """A PEFT directory for the query and down projections of `base`."""
    directory.mkdir()
    torch.manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, width or weight.shape[1]) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], rank) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "down_proj"],
        "base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", "bias": "none",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(directory: Path, base: Path, adapter: Path) -> Path:
    """The base with W + (alpha / r) B A."""
    shutil.copytree(base, directory)
    weights, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in parts.items():
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            target = f"{stem.removeprefix('base_model.model.')}weight"
            weights[target] += 2.0 * parts[f"{stem}lora_B.weight"] @ a
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_adapters_are_swapped_over_one_base(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], logprobs: Logprobs, tmp_path: Path
) -> None:
    base = make_model(50)
    engine, wanted = make_engine(lora_rank=8), requests(random_prompts(3, [300, 20]), 2)
    cores = set()
    for number in range(1, 4):
        adapter = make_adapter(tmp_path / f"adapter{number}", base, number)
        engine.load(Version("policy", number), adapter)
        found = run(engine, wanted, SAMPLING)
        whole = merged(tmp_path / f"merged{number}", base, adapter)
        assert worst(logprobs, whole, wanted, found) <= 2e-5
        assert worst(logprobs, base, wanted, found) > 0.1
        assert {sample.version for sample in found.values()} == {number}
        cores.add(id(engine._engine))
    assert len(cores) == 1
    other = make_adapter(tmp_path / "other", make_model(51), 1)
    with pytest.raises(ValueError, match=r"is for base .*, this engine holds"):
        engine.load(Version("policy", 9), other)
    narrow = make_adapter(tmp_path / "narrow", base, 1, width=7)
    with pytest.raises(ValueError, match=r"is for another base: .*lora_A.weight is \[8, 7\]"):
        engine.load(Version("policy", 9), narrow)
    with pytest.raises(ValueError, match="rank 16, above lora_rank 8"):
        engine.load(Version("policy", 9), make_adapter(tmp_path / "high", base, 1, rank=16))
    assert worst(logprobs, whole, wanted, run(engine, wanted, SAMPLING)) <= 2e-5  # what was refused changed nothing


def test_an_engine_without_adapters_says_so(
    make_engine: Callable[..., VllmEngine], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", make_model(50), 1)
    with pytest.raises(ValueError, match="this engine takes none; wants lora_rank = 8"):
        make_engine().load(Version("policy", 1), adapter)
