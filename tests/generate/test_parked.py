"""Engines that park and come back: nothing of the weights in private memory meanwhile, the same samples afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from functions.base.wire import Call, Version
from functions.call.function import Context, Parks, ReplicaBroken
from functions.exchange.directory import DirectoryExchange
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.engines import Choice, EngineOptions, make_engine
from functions.generate.function import GenerateFunction
from functions.models.parked import HostMemory, give_back, tensors_in
from functions.models.pretrained import save_model
from functions.reference.function import ReferenceFunction
from functions.weights.base import import_model
from tests.support.processes import private_mb

SAMPLING = Sampling(12, seed=3)


def bits(samples: dict[int, Sample]) -> dict[int, tuple[bytes, bytes]]:
    return {number: (s.response.tobytes(), s.logprobs.tobytes()) for number, s in samples.items()}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("engine", ["torch", "transformers"])
@pytest.mark.parametrize("model", ["llama-tied-rope3", "gemma3"])
def test_an_engine_that_was_parked_samples_the_same_bits(
    engine: str, model: str, deterministic: bool,
    model_dir: Callable[[str], Path], requests_for: Callable[..., list[Request]],
) -> None:  # fmt: skip
    options = EngineOptions(torch.float32, torch.device("cpu"), 8, deterministic)
    made = make_engine(Choice(engine, ""), options)
    made.load(Version("policy", 1), model_dir(model))
    wanted = requests_for(3, 2)

    def sampled() -> dict[int, tuple[bytes, bytes]]:
        return bits({s.number: s for s in made.generate(wanted, SAMPLING, lambda: False)})

    before = sampled()
    for _ in range(2):
        made.park(None)
        made.unpark()
        assert sampled() == before
    made.load(Version("policy", 2), model_dir("llama"))
    made.park(None)
    made.unpark()
    assert sampled() != before


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MB of weights."""
    directory = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    save_model(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
                bos_token_id=0, eos_token_id=1, pad_token_id=2,
            )
        ),
        directory,
    )  # fmt: skip
    return directory


def held(kind: str, version: Version, context: Context) -> tuple[Parks, torch.nn.Module]:
    """A function with the model of `version`, and that where it is a module."""
    if kind == "reference":
        reference = ReferenceFunction(device="cpu")
        key = reference._model("logprobs", version, context)
        return reference, reference._team.member.held[key].model
    generate = GenerateFunction(device="cpu", engine=kind, deterministic=True, slots=4)
    engine, _ = generate.policy.hold(version, context)
    model = engine._model  # type: ignore[attr-defined]
    return generate, model if kind == "transformers" else torch.nn.Module()


@pytest.mark.parametrize("kind", ["torch", "transformers", "reference"])
def test_a_parked_function_has_no_weights_in_private_memory(kind: str, large: Path, tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", large)
    size_mb = sum(f.stat().st_size for f in large.glob("*.safetensors")) / 2**20
    context = Context(exchange, str(tmp_path / "scratch"))
    gc.collect()
    give_back()
    empty = private_mb()
    function, model = held(kind, version, context)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.0)  # transformers maps the file; these pages are the process's own from here on
    del model
    assert private_mb() - empty > 0.8 * size_mb
    assert function.park() == 0
    gc.collect()
    assert private_mb() - empty < 0.2 * size_mb
    function.unpark()


def test_a_canary_that_differs_breaks_the_replica_before_it_samples(
    tmp_path: Path, model_dir: Callable[[str], Path]
) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", model_dir("llama"))
    function = GenerateFunction(device="cpu", engine="torch")
    engine, _ = function.policy.hold(version, Context(exchange, str(tmp_path)))
    assert function.park() == 0
    model = engine._held()  # type: ignore[attr-defined]
    model.layers[1].down.weight.mul_(1.5)  # what a level-2 sleep without a reload does, or a page that went bad
    with pytest.raises(ReplicaBroken, match=r"the canary of policy v000000\.base differs after waking: tokens \["):
        function.unpark()


def test_an_engine_that_does_not_wake_breaks_the_replica(tmp_path: Path, model_dir: Callable[[str], Path]) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", model_dir("llama"))
    function = GenerateFunction(device="cpu", engine="torch")
    engine, _ = function.policy.hold(version, Context(exchange, str(tmp_path)))
    function.park()
    engine.close()
    with pytest.raises(ReplicaBroken, match="the engine does not wake up: AssertionError"):
        function.unpark()


def test_a_function_that_holds_nothing_parks_and_comes_back(tmp_path: Path) -> None:
    function = GenerateFunction(device="cpu")
    assert function.park() is None
    function.unpark()
    with pytest.raises(Exception, match="generate wants the version"):
        list(function.call(Call("c", "generate", params={"max_response_length": 2}), Context(None, "")))  # type: ignore[arg-type]


def test_views_of_one_storage_share_it_afterwards_at_the_same_alignment() -> None:
    whole = torch.arange(10_000, dtype=torch.float32)
    one, two = whole[1003:5000].detach(), whole.view(100, 100)[20:60, 3:7].detach()
    tied = torch.nn.Parameter(one)
    before, at = two.clone(), [t.data_ptr() % 64 for t in (one, two)]
    host = HostMemory()
    for _ in range(2):
        host.park(tensors_in({"a": [one, tied]}, (two,), None, 3))
        host.unpark()
    assert torch.equal(two, before)
    assert two.stride() == (100, 1)
    assert [t.data_ptr() % 64 for t in (one, two)] == at
    with torch.no_grad():
        tied[2000] = -1.0
    assert float(one[2000]) == -1.0
    two[10, 0] = 7.0
    assert float(one[2000]) == float(tied.detach()[2000]) == 7.0, "element 3003 of all"
    assert np.shares_memory(one.numpy(), two.numpy())
