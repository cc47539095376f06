"""The generate function over an exchange in a directory: events, repetition, cuts, bad input."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from functions.base.samples import Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Ref, Version
from functions.call.function import Cancelled, Context, FatalError
from functions.exchange.directory import DirectoryExchange
from functions.generate.function import GenerateFunction
from functions.server import kinds
from functions.weights.base import import_model

PARAMS = {"max_response_length": 12, "seed": 5, "chunk": 4}


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(f"{tmp_path}/exchange")


@pytest.fixture
def policy(exchange: DirectoryExchange, model_dir: Callable[[str], Path]) -> Version:
    return import_model(exchange, "actor", model_dir("llama"))


@pytest.fixture
def context(exchange: DirectoryExchange, tmp_path: Path) -> Context:
    return Context(exchange, str(tmp_path / "scratch"))


@pytest.fixture
def batch() -> SampleBatch:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 97, n).tolist() for n in (5, 9, 2)]
    return SampleBatch.of_prompts(prompts, samples_per_prompt=4, version=0, first_group=7)


def call_for(batch: SampleBatch, context: Context, policy: Version, **params: Any) -> Call:
    ref = context.exchange.put("batches/0", batch.encode())
    return Call("c", "generate", {"samples": [ref]}, {"policy": policy}, PARAMS | params)


def samples_of(events: list[Event], context: Context) -> SampleBatch:
    refs = [event.ref for event in events if event.ref is not None]
    return SampleBatch.concat([SampleBatch.decode(context.exchange.get(ref)) for ref in refs]).in_order()


def same(a: SampleBatch, b: SampleBatch) -> bool:
    return a.encode() == b.encode()


def test_what_has_waited_is_handed_over_though_it_is_few(batch: SampleBatch, context: Context, policy: Version) -> None:
    call = call_for(batch, context, policy, chunk=99, chunk_s=0.0)
    *events, _ = GenerateFunction(slots=8).call(call, context)
    assert [len(event.data["group"]) for event in events] == [1] * len(batch)


def test_streams_chunks_and_ends_with_counts(batch: SampleBatch, context: Context, policy: Version) -> None:
    events = list(GenerateFunction(slots=8).call(call_for(batch, context, policy), context))
    assert [e.kind for e in events][-1] == "done"
    chunks = [e for e in events if e.kind == "samples"]
    assert len(chunks) == len(events) - 1
    assert all(len(e.data["group"]) >= 4 for e in chunks[:-1])
    whole = samples_of(events, context)
    assert whole.group.tolist() == batch.group.tolist()
    assert whole.index.tolist() == batch.index.tolist()
    assert whole.mask.tolist() == [1.0] * int(whole.responses.lengths.sum())
    for event in chunks:
        assert event.ref is not None
        assert event.ref.key.startswith("calls/c/samples.")
        part = SampleBatch.decode(context.exchange.get(event.ref))
        assert event.data == {
            "group": part.group.tolist(),
            "index": part.index.tolist(),
            "prompt_length": [len(part.prompts[p]) for p in part.prompt],
            "length": part.responses.lengths.tolist(),
            "finish": part.finish.tolist(),
        }
    data = events[-1].data
    assert data["prefill_tokens"] == 16
    assert data["engine"] == "torch"
    assert "Llama-shaped" in data["why"]


def test_a_repeated_call_makes_only_what_is_missing(batch: SampleBatch, context: Context, policy: Version) -> None:
    function, call = GenerateFunction(slots=8, deterministic=True), call_for(batch, context, policy)
    first = list(function.call(call, context))
    whole = samples_of(first, context)
    again = Context(context.exchange, context.scratch, prior=iter(first[:2]))
    rest = list(function.call(call, again))
    assert same(samples_of(first[:2] + rest, context), whole)
    assert {e.ref.key for e in rest if e.ref}.isdisjoint({e.ref.key for e in first[:2] if e.ref})
    everything = Context(context.exchange, context.scratch, prior=iter(first[:-1]))
    assert [e.kind for e in function.call(call, everything)] == ["done"]


class CutAfter(Context):
    """Asks for a cut at the `looks`-th look."""

    looks = 0

    def cut_requested(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", [0, 1, 5, 9])
@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_a_cut_hands_over_what_there_is_and_goes_on_elsewhere(
    batch: SampleBatch, context: Context, policy: Version, looks: int, engine: str
) -> None:
    function = GenerateFunction(slots=8, deterministic=True, engine=engine)
    whole = samples_of(list(function.call(call_for(batch, context, policy), context)), context)
    cut = CutAfter(context.exchange, context.scratch)
    cut.looks = looks
    events = list(function.call(call_for(batch, context, policy), cut))
    assert [e.kind for e in events][-2:] == ["cut", "done"]
    ref = events[-2].ref
    assert isinstance(ref, Ref)
    unfinished = SampleBatch.decode(context.exchange.get(ref))
    assert set(unfinished.finish.tolist()) == {Finish.UNFINISHED}
    other = GenerateFunction(slots=8, deterministic=True, engine=engine)
    further = Call("d", "generate", {"samples": [ref]}, {"policy": policy}, PARAMS)
    more = list(other.call(further, context))
    assert same(samples_of(events[:-2] + more, context), whole)


def test_tokens_that_were_given_keep_their_mask(batch: SampleBatch, context: Context, policy: Version) -> None:
    import dataclasses

    begun = dataclasses.replace(
        batch.select([0, 1]),
        responses=Ragged.from_rows([[5, 6, 7], [8]], np.int32),
        logprobs=np.full(4, -1.0, np.float32),
        mask=np.array([1, 0, 1, 0], np.float32),
    )
    call = call_for(begun, context, policy, ignore_eos=True)
    found = samples_of(list(GenerateFunction().call(call, context)), context)
    masks = Ragged(found.mask, found.responses.lengths).rows()
    assert masks[0].tolist() == [1, 0, 1] + [1] * 9
    assert masks[1].tolist() == [0] + [1] * 11
    assert found.responses[0][:3].tolist() == [5, 6, 7]


def test_a_cancelled_call_ends(batch: SampleBatch, context: Context, policy: Version) -> None:
    events: Iterator[Event] = GenerateFunction(slots=4).call(call_for(batch, context, policy), context)
    next(events)
    context.cancelled.set()
    with pytest.raises(Cancelled):
        list(events)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_response_length": 0}, "max_response_length is 0, wants 1"),
        ({"temperature": -1.0}, "temperature is -1.0, wants 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"chunk": 0}, "chunk is 0"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"seed": "x"}, "params of generate.seed"),
        ({"max_response_length": 120}, "exceeds the model's context of 128"),
    ],
)
def test_bad_params(
    batch: SampleBatch, context: Context, policy: Version, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(FatalError, match=message):
        list(GenerateFunction().call(call_for(batch, context, policy, **params), context))


def test_bad_calls(batch: SampleBatch, context: Context, policy: Version) -> None:
    import dataclasses

    def fails(call: Call, message: str) -> None:
        with pytest.raises(FatalError, match=message):
            list(GenerateFunction().call(call, context))

    good = call_for(batch, context, policy)
    fails(dataclasses.replace(good, operation="score"), "no operation 'score'; it has: generate")
    fails(dataclasses.replace(good, weights={}), r"weights\.policy")
    fails(dataclasses.replace(good, inputs={}), "wants inputs 'samples'")
    fails(
        dataclasses.replace(good, inputs={"samples": [*good.inputs["samples"]] * 2}),
        r"group 7, index 0\) is given twice",
    )
    finished = dataclasses.replace(batch, finish=np.full(len(batch), Finish.STOP, np.int32))
    fails(call_for(finished, context, policy), r"group 7, index 0\) is finished already \(STOP\)")
    other = dataclasses.replace(
        batch.select([3]),
        responses=Ragged.from_rows([[4]], np.int32),
        logprobs=np.zeros(1, np.float32),
        mask=np.ones(1, np.float32),
        version=np.array([9], np.int32),
    )
    fails(call_for(other, context, policy), r"index 3\) was begun by version 9; the call's policy is 0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "tensorrt"}, "engine 'tensorrt': wants one of auto, torch, transformers, vllm"),
        ({"slots": 0}, "slots is 0"),
        ({"deterministic": True, "threads": 2}, "threads is 2 with deterministic"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "tpu"}, "tpu"),
        ({"slot": 4}, "did you mean 'slots'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FatalError, match=message):
        kinds.build("generate", options)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed, and auto takes it for these"
)
def test_auto_takes_transformers_for_other_architectures(
    exchange: DirectoryExchange, context: Context, batch: SampleBatch, model_dir: Callable[[str], Path]
) -> None:
    version = import_model(exchange, "actor", model_dir("gpt2"))
    events = list(GenerateFunction().call(call_for(batch, context, version), context))
    assert events[-1].data["engine"] == "transformers"
    assert "GPT2LMHeadModel is not Llama-shaped" in events[-1].data["why"]
    assert len(samples_of(events, context)) == len(batch)
    with pytest.raises(FatalError, match=r"cannot run .*GPT2LMHeadModel is not Llama-shaped"):
        list(GenerateFunction(engine="torch").call(call_for(batch, context, version), context))
