"""The generate function with the vLLM engine, as a replica runs it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from functions.base.samples import Finish, SampleBatch
from functions.base.wire import Call, Event, Load, Ref, Version
from functions.call.function import Context, FatalError
from functions.exchange.directory import DirectoryExchange
from functions.generate.engine.base import Sample
from functions.generate.engines import EngineOptions, choose
from functions.generate.function import GenerateFunction
from functions.generate.vllm.engine import VllmEngine
from functions.weights.base import import_model
from functions.weights.delta import difference
from functions.weights.manifest import Adapter
from functions.weights.materialize import materialize
from functions.weights.store import blobs, fetch
from tests.support.versions import publish
from tests.vllm.samples import Logprobs, edit_config, random_prompts, requests

pytestmark = pytest.mark.vllm

CPU = EngineOptions(torch.float32, torch.device("cpu"), 64, False)


def engine_of(function: GenerateFunction) -> VllmEngine:
    engine = function.policy.engine
    assert isinstance(engine, VllmEngine)
    return engine


def test_a_call_that_is_cut_and_taken_up_by_another_replica(
    make_model: Callable[..., Path], logprobs: Logprobs, tmp_path: Path
) -> None:
    """The samples of both together are those of a call that was not cut, and transformers agrees with each; those that
    go on with a full block of keys and values are not computed again."""
    model = make_model(70)
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", model)
    function = GenerateFunction(engine="vllm", device="cpu", vllm={"context": 512})
    params = {"max_response_length": 40, "seed": 9, "chunk": 1}

    def call(
        name: str, batch: SampleBatch, cut_at: int | None = None, caches: Sequence[Ref] = ()
    ) -> tuple[list[Event], list[SampleBatch]]:
        """Events, and the samples of all but `done`; the cut is asked for after `cut_at` events."""
        ref = exchange.put(f"batches/{name}", batch.encode())
        context = Context(exchange, str(tmp_path))
        events = []
        inputs = {"samples": [ref], "caches": caches}
        asked = Call(name, "generate", inputs=inputs, weights={"policy": version}, params=params)
        for event in function.call(asked, context):
            events.append(event)
            if len(events) == cut_at:
                context.cut.set()
        return events, [SampleBatch.decode(exchange.get(event.ref)) for event in events if event.ref]

    prompts = random_prompts(0, [10, 60, 200])
    whole_events, whole = call("whole", SampleBatch.of_prompts(prompts, samples_per_prompt=4, version=0))
    assert whole_events[-1].kind == "done"
    assert whole_events[-1].data["engine"] == "vllm"
    assert whole_events[-1].data["decode_tokens"] > 0
    events, first = call("cut", SampleBatch.of_prompts(prompts, samples_per_prompt=4, version=0), cut_at=2)
    assert [event.kind for event in events[-2:]] == ["cut", "done"]
    caches = [Ref.from_json(ref) for refs in events[-2].data["caches"] for ref in refs]
    engine_of(function).forget_prefixes()  # as if it were the other replica's
    rest_events, second = call("rest", first[-1], caches=caches)
    lengths = first[-1].prompts.lengths[first[-1].prompt]
    blocks = (lengths + first[-1].responses.lengths - 1) // 32
    brought = sum(blocks) - sum(length // 32 * (sum(lengths == length) - 1) for length in set(lengths.tolist()))
    assert rest_events[-1].data["moved_tokens"] == 32 * brought
    assert rest_events[-1].data["moved_tokens"] + rest_events[-1].data["shared_tokens"] == 32 * sum(blocks)
    assert brought > 0
    assert "cache" not in rest_events[-1].data
    parts = first[:-1] + second

    def by_key(batches: list[SampleBatch]) -> dict[tuple[int, int], tuple[list[int], int]]:
        found = {}
        for batch in batches:
            for row, response in enumerate(batch.responses.rows()):
                key = int(batch.group[row]), int(batch.index[row])
                assert key not in found
                found[key] = response.tolist(), int(batch.finish[row])
        return found

    expected = by_key(whole)
    assert by_key(parts) == expected
    assert len(expected) == 12
    assert {finish for _, finish in expected.values()} <= {Finish.STOP, Finish.LENGTH}
    (request,) = requests([prompts[int(whole[0].group[0])]])
    sample = Sample(0, whole[0].responses[0], whole[0].logprobs[: whole[0].responses.lengths[0]], Finish.STOP, 0)
    assert np.allclose(sample.logprobs, logprobs(model, request, sample, 1.0), atol=1e-5)


def test_published_adapters_are_swapped_over_the_base_that_is_held(
    make_model: Callable[..., Path], logprobs: Logprobs, tmp_path: Path
) -> None:
    """Version 0 is the base, 1 and 2 are adapters; a second replica starts at 2, a third one has loaded 1 ahead of it.
    Merged weights are the reference."""
    model = make_model(73)
    exchange = DirectoryExchange(tmp_path / "exchange")
    base = import_model(exchange, "policy", model)
    layers = load_file(model / "model.safetensors")
    versions = [base]
    for number in (1, 2):
        torch.manual_seed(number)
        tensors = {}
        for name, weight in layers.items():
            if name.endswith("q_proj.weight"):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(8, weight.shape[1]) * 0.1
                tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], 8) * 0.1
        versions.append(Version("policy", number, "call"))
        adapter = Adapter(base, 8, 16.0, ("q_proj",))
        publish(
            exchange,
            versions[-1],
            tensors=tensors,
            state={},
            trainer={},
            model_files=None,
            parent=base,
            adapter=adapter,
        )
    batch = SampleBatch.of_prompts(random_prompts(1, [20]), samples_per_prompt=1, version=0)
    ref = exchange.put("batches/one", batch.encode())
    (request,) = requests(random_prompts(1, [20]))
    for replica, ahead, order in ((0, [], versions), (1, [], versions[2:]), (2, versions[1:2], versions[2:])):
        function = GenerateFunction(engine="vllm", device="cpu", vllm={"context": 512, "lora_rank": 8})
        engines = set()
        for version in ahead:
            function.load_ahead(Load("generate", {"policy": version}), Context(exchange, str(tmp_path / "scratch")))
            engines.add(engine_of(function).held())
        for version in order:
            asked = Call(
                f"{replica}.{version.number}", "generate", inputs={"samples": [ref]}, weights={"policy": version},
                params={"max_response_length": 16, "ignore_eos": True},
            )  # fmt: skip
            events = list(function.call(asked, Context(exchange, str(tmp_path / "scratch"))))
            assert events[0].ref is not None
            found = SampleBatch.decode(exchange.get(events[0].ref))
            assert found.version.tolist() == [version.number]
            sample = Sample(0, found.responses[0], found.logprobs, Finish.LENGTH, version.number)
            merged = materialize(exchange, version, tmp_path / "merged" / str(version.number))
            assert np.allclose(found.logprobs, logprobs(merged, request, sample, 1.0), atol=2e-5)
            engines.add(engine_of(function).held())
        assert len(engines) == 1
        engine_of(function).close()


def test_a_kept_replica_follows_by_deltas(make_model: Callable[..., Path], logprobs: Logprobs, tmp_path: Path) -> None:
    """The same engine all along, on weights that are those of each version."""
    exchange = DirectoryExchange(tmp_path / "exchange")
    parent = import_model(exchange, "policy", make_model(75))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in fetch(exchange, parent).items()}
    batch = SampleBatch.of_prompts(random_prompts(1, [20]), samples_per_prompt=1, version=0)
    refs, (request,) = [exchange.put("batches/one", batch.encode())], requests(random_prompts(1, [20]))
    function, engines = GenerateFunction(engine="vllm", device="cpu", vllm={"context": 512}), set()
    delta: tuple[bytes, ...] = ()
    params = {"max_response_length": 16, "ignore_eos": True}
    for number in range(1, 4):
        version = Version("policy", number, "call")
        manifest = publish(
            exchange, version, tensors=tensors, state={}, trainer={}, model_files=None, parent=parent, delta=delta
        )
        context = Context(exchange, str(tmp_path / "scratch"))
        (samples, _) = function.call(
            Call(str(number), "generate", {"samples": refs}, {"policy": version}, params), context
        )
        assert samples.ref is not None
        found = SampleBatch.decode(exchange.get(samples.ref))
        sample = Sample(0, found.responses[0], found.logprobs, Finish.LENGTH, number)
        whole = materialize(exchange, version, tmp_path / "whole" / str(number))
        assert np.allclose(found.logprobs, logprobs(whole, request, sample, 1.0), atol=2e-5)
        assert ("fetch delta" in [span.name for span in context.meter.spans]) == (number > 1)
        engines.add(engine_of(function).held())
        old, parent = tensors, version
        tensors = {n: torch.where(torch.rand(t.shape) < 0.05, t + 0.05, t) for n, t in old.items()}
        change = difference(manifest, blobs(old), blobs(tensors))
        assert change is not None
        delta = change.parts
    assert len(engines) == 1
    engine_of(function).close()


def test_auto_says_what_it_took_and_why(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model(71)
    choice = choose("auto", model, CPU)
    assert (choice.name, choice.why) == ("torch", "the model is Llama-shaped and the device no GPU")
    edit_config(model, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    choice = choose("auto", model, CPU)
    assert choice.name == "vllm"
    assert choice.why.startswith("not torch: ")
    edit_config(model, model_type="xlm", architectures=["XLMWithLMHeadModel"])
    choice = choose("auto", model, CPU)
    assert choice.name == "transformers"
    assert choice.why.endswith("not vLLM: it does not know the model's architecture")


def test_auto_does_not_import_vllm_where_it_would_not_be_taken(make_model: Callable[..., Path]) -> None:
    """Each replica that starts chooses: seconds of import would be paid by every one of them."""
    program = (
        "import sys; from pathlib import Path; import torch\n"
        "from functions.generate.engines import EngineOptions, choose\n"
        "options = EngineOptions(torch.float32, torch.device('cpu'), slots=4, deterministic=False)\n"
        "print(choose('auto', Path(sys.argv[1]), options).name, 'vllm' in sys.modules)"
    )
    asked = [sys.executable, "-c", program, str(make_model(73))]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split() == ["torch", "False"]


def test_vllm_that_cannot_do_what_was_asked_names_the_engine_that_can(make_model: Callable[..., Path]) -> None:
    model = make_model(72)
    with pytest.raises(FatalError, match=r"forbids; engine = 'torch' can$"):
        choose("vllm", model, dataclasses.replace(CPU, deterministic=True))
    with pytest.raises(FatalError, match=r"built for cpu, the device is cuda; engine = 'torch' can$"):
        choose("vllm", model, dataclasses.replace(CPU, device=torch.device("cuda")))
    edit_config(model, model_type="xlm", architectures=["XLMWithLMHeadModel"])
    with pytest.raises(FatalError, match=r"does not know the model's architecture; engine = 'transformers' can$"):
        choose("vllm", model, CPU)
    with pytest.raises(TypeError, match="speed"):
        GenerateFunction(vllm={"speed": 2})
