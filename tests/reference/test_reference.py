"""The reference function against transformers, sample by sample, and its bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Version
from functions.call.function import Cancelled, Context, FatalError
from functions.exchange.base import Corrupt, NotFound
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import load_causal_lm, load_critic, save_model, score_head
from functions.reference.function import ReferenceFunction
from functions.weights.base import import_model
from functions.weights.delta import difference
from functions.weights.manifest import read_manifest
from functions.weights.store import blobs, fetch
from tests.support.versions import publish

VOCABULARY = 41
BASE = Version("policy", 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(model, path)
    return path


@pytest.fixture
def exchange(tmp_path: Path, directory: Path) -> DirectoryExchange:
    exchange = DirectoryExchange(tmp_path / "exchange")
    import_model(exchange, "policy", directory)
    return exchange


@pytest.fixture
def samples() -> SampleBatch:
    rng = np.random.default_rng(0)
    base = SampleBatch.of_prompts([[3, 4, 5], [6]], samples_per_prompt=3, version=0)
    lengths = np.array([4, 9, 1, 0, 7, 7], np.int32)
    total = int(lengths.sum())
    return SampleBatch(
        base.prompts, base.prompt, base.group, base.index,
        Ragged(rng.integers(3, VOCABULARY, total).astype(np.int32), lengths), np.zeros(total, np.float32),
        np.ones(total, np.float32), np.full(6, Finish.STOP, np.int32), base.version,
    )  # fmt: skip


def run(
    function: ReferenceFunction,
    exchange: DirectoryExchange,
    tmp_path: Path,
    batches: list[SampleBatch],
    operation: str = "logprobs",
    version: Version = BASE,
    **params: Any,
) -> tuple[Columns, Event]:
    refs = [exchange.put(f"batches/{i}", batch.encode()) for i, batch in enumerate(batches)]
    call = Call("c1", operation, {"samples": refs}, {"model": version}, params)
    events = list(function.call(call, Context(exchange, str(tmp_path / "scratch"))))
    assert [event.kind for event in events] == ["done"]
    assert events[0].ref is not None
    assert events[0].ref.key.startswith("calls/c1/")
    return Columns.decode(exchange.get(events[0].ref)), Event.from_line(events[0].to_line())


def test_logprobs_equal_those_of_transformers(
    exchange: DirectoryExchange, tmp_path: Path, directory: Path, samples: SampleBatch
) -> None:
    function = ReferenceFunction(device="cpu", threads=1)
    halves = [samples.select([5, 1, 3]), samples.select([0, 4, 2])]
    columns, event = run(function, exchange, tmp_path, halves, temperature=0.6, micro_batch_tokens=12)
    model = load_causal_lm(directory)
    for row, response in enumerate(samples.responses.rows()):
        prompt = samples.prompts.rows()[samples.prompt[row]]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0, len(prompt) - 1 :] / 0.6, -1)
        expected = log_p[: len(response)].gather(1, tokens[len(prompt) :, None])[:, 0]
        got = Ragged(columns.token["ref_logprobs"], columns.lengths).rows()[row]
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-5, atol=1e-5)
    assert event.data["shared_prefix"]
    assert event.data["packs"] > 1
    assert Columns.align(samples, [columns]).token["ref_logprobs"].shape == samples.logprobs.shape


def test_values_are_those_of_the_critic_and_zero_before_it_learned(
    exchange: DirectoryExchange, tmp_path: Path, directory: Path, samples: SampleBatch
) -> None:
    function = ReferenceFunction(device="cpu", threads=1)
    columns, _ = run(function, exchange, tmp_path, [samples], "values")
    assert not columns.token["values"].any()
    model = load_critic(directory)
    torch.manual_seed(1)
    head = torch.randn(1, 32)
    version = Version("critic", 1, "x")
    tensors = fetch(exchange, Version("policy", 0)) | {"score.weight": head}
    publish(exchange, version, tensors=tensors, state={}, trainer={}, model_files=None, parent=Version("policy", 0))
    columns, _ = run(function, exchange, tmp_path, [samples], "values", version, column="cost_values")
    with torch.no_grad():
        score_head(model).weight.copy_(head)
        states = model.base_model(torch.tensor([[6, *samples.responses.rows()[4].tolist()]])).last_hidden_state[0]
        expected = (states @ head.T)[:-1, 0]
    got = Ragged(columns.token["cost_values"], columns.lengths).rows()[4]
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-5, atol=1e-5)


def test_each_version_is_itself_and_held_models_are_used_again(
    exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch
) -> None:
    function = ReferenceFunction(device="cpu", threads=1, models=2)
    base = Version("policy", 0)
    versions = []
    for number in range(1, 4):
        tensors = {name: tensor * (1 + 0.1 * number) for name, tensor in fetch(exchange, base).items()}
        versions.append(Version("policy", number, "x"))
        publish(exchange, versions[-1], tensors=tensors, state={}, trainer={}, model_files=None, parent=base)
    first = {v: run(function, exchange, tmp_path, [samples], version=v)[0].token["ref_logprobs"] for v in versions}
    for one, two in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(first[versions[one]] - first[versions[two]]).max() > 1e-3
    for entry in read_manifest(exchange, versions[2]).tensors:
        exchange.delete(entry.pieces[0].key)  # what it holds, it does not fetch again
    for version in (versions[1], versions[0]):
        again, _ = run(function, exchange, tmp_path, [samples], version=version)
        assert np.array_equal(again.token["ref_logprobs"], first[version])
    with pytest.raises(Corrupt, match=r"policy v000003"):
        run(function, exchange, tmp_path, [samples], version=versions[2])


def test_a_kept_critic_follows_by_deltas(exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch) -> None:
    """In bfloat16 on a CPU, where the model's weights may be the pages of the files that a delta is written into."""
    torch.manual_seed(2)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in fetch(exchange, BASE).items()}
    tensors["score.weight"] = torch.randn(1, 32, dtype=torch.bfloat16)
    versions = [Version("critic", number, "x") for number in range(1, 4)]
    delta: tuple[bytes, ...] = ()
    for parent, version in zip([BASE, *versions], versions, strict=False):
        manifest = publish(
            exchange, version, tensors=tensors, state={}, trainer={}, model_files=None, parent=parent, delta=delta
        )
        old, tensors = tensors, {n: torch.where(torch.rand(t.shape) < 0.05, t * 2, t) for n, t in tensors.items()}
        change = difference(manifest, blobs(old), blobs(tensors))
        assert change is not None
        delta = change.parts
    kept, seen = ReferenceFunction(device="cpu", threads=1, dtype="bfloat16"), list[bytes]()
    for number, version in enumerate(versions):
        call = Call("c2", "values", {"samples": [exchange.put("batches/x", samples.encode())]}, {"model": version})
        context = Context(exchange, str(tmp_path / "kept"))
        (done,) = kept.call(call, context)
        assert done.ref is not None
        values = Columns.decode(exchange.get(done.ref)).token["values"]
        new = ReferenceFunction(device="cpu", threads=1, dtype="bfloat16")
        expected, _ = run(new, exchange, tmp_path / str(number), [samples], "values", version)
        assert np.array_equal(values, expected.token["values"])
        assert ("fetch delta" in [span.name for span in context.meter.spans]) == (number > 0)
        seen.append(values.tobytes())
    assert len(set(seen)) == 3
    run(kept, exchange, tmp_path / "frozen", [samples], version=BASE)
    assert not (tmp_path / "frozen" / "scratch" / "reference").exists()  # a reference is not trained: no copy stays


def test_bad_calls_are_named(exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch) -> None:
    function = ReferenceFunction(device="cpu", threads=1)
    with pytest.raises(FatalError, match="operation 'score'"):
        run(function, exchange, tmp_path, [samples], "score")
    with pytest.raises(FatalError, match="unknown key 'temprature'; did you mean 'temperature'"):
        run(function, exchange, tmp_path, [samples], temprature=1.0)
    with pytest.raises(FatalError, match="temperature: got 0"):
        run(function, exchange, tmp_path, [samples], temperature=0)
    with pytest.raises(FatalError, match="wants weights 'model'"):
        list(function.call(Call("c", "values"), Context(exchange, str(tmp_path))))
    with pytest.raises(NotFound, match=r"policy v000009"):
        run(function, exchange, tmp_path, [samples], version=Version("policy", 9))
    with pytest.raises(FatalError, match="device 'gpu'"):
        ReferenceFunction(device="gpu")
    context = Context(exchange, str(tmp_path / "scratch"))
    context.cancelled.set()
    call = Call("c", "logprobs", {"samples": [exchange.put("b", samples.encode())]}, {"model": Version("policy", 0)})
    with pytest.raises(Cancelled):
        list(function.call(call, context))


def test_a_model_that_gives_no_number_is_named(
    exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch
) -> None:
    tensors = fetch(exchange, Version("policy", 0))
    tensors["model.embed_tokens.weight"][int(samples.responses.rows()[4][0])] = float("nan")
    version = Version("broken", 0)
    publish(exchange, version, tensors=tensors, state={}, trainer={}, model_files=None, parent=Version("policy", 0))
    with pytest.raises(FatalError, match=r"sample \(group \d, index \d\): nan"):
        run(ReferenceFunction(device="cpu"), exchange, tmp_path, [samples], version=version)


def test_the_most_probable_tokens_are_said_beside(
    exchange: DirectoryExchange, tmp_path: Path, directory: Path, samples: SampleBatch
) -> None:
    columns, _ = run(ReferenceFunction(device="cpu"), exchange, tmp_path, [samples], top_k=3)
    found = Columns.align(samples, [columns]).token
    model, offsets = load_causal_lm(directory), samples.responses.offsets
    for row, response in enumerate(samples.responses.rows()):
        prompt = samples.prompts.rows()[samples.prompt[row]]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0, len(prompt) - 1 : -1], -1)
        part = slice(int(offsets[row]), int(offsets[row + 1]))
        best = log_p.topk(3, -1)
        np.testing.assert_allclose(found["teacher_logprobs"][part], best.values.numpy(), atol=1e-5)
        assert (found["teacher_ids"][part] == best.indices.numpy()).all()
