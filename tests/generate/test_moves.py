"""The generate function hands keys and values over through the exchange; what goes wrong with them costs time alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from functions.base.samples import Finish, SampleBatch
from functions.base.wire import Call, Event, Ref, Version
from functions.call.function import Context, FatalError
from functions.exchange.base import Data, Unavailable
from functions.exchange.directory import DirectoryExchange
from functions.generate import moves
from functions.generate.engine.base import Sample
from functions.generate.engine.keys_values import decode, join
from functions.generate.function import GenerateFunction
from functions.generate.moves import Outbox
from functions.weights.base import import_model

PARAMS = {"max_response_length": 12, "seed": 5, "chunk": 4, "cut_parts": 2, "ignore_eos": True}
PROMPTS, SAMPLES = (5, 9, 2), 4


class CutAfter(Context):
    """Asks for a cut at the `looks`-th look."""

    looks = 5

    def cut_requested(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Scene:
    """A call that is cut, and one that goes on with what it left."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.exchange = root, DirectoryExchange(f"{root}/exchange")
        self.policy = import_model(self.exchange, "actor", model)
        rng = np.random.default_rng(1)
        prompts = [rng.integers(3, 97, n).tolist() for n in PROMPTS]
        batch = SampleBatch.of_prompts(prompts, samples_per_prompt=SAMPLES, version=0, first_group=7)
        self.samples = self.exchange.put("batches/0", batch.encode())

    def function(self, **options: Any) -> GenerateFunction:
        return GenerateFunction(**({"slots": 12, "deterministic": True} | options))

    def context(self) -> Context:
        return Context(self.exchange, f"{self.root}/scratch")

    def call(self, inputs: dict[str, Sequence[Ref]], identity: str = "c", version: int = 0) -> Call:
        return Call(identity, "generate", inputs, {"policy": Version("actor", version)}, PARAMS)

    def uncut(self) -> SampleBatch:
        return self.joined(list(self.function().call(self.call({"samples": [self.samples]}), self.context())))

    def cut(self, exchange: DirectoryExchange | None = None, **options: Any) -> list[Event]:
        context = CutAfter(exchange or self.exchange, f"{self.root}/scratch")
        return list(self.function(**options).call(self.call({"samples": [self.samples]}), context))

    def inputs(self, cut: Sequence[Event]) -> dict[str, Sequence[Ref]]:
        parts = [event for event in cut if event.kind == "cut"]
        caches = [Ref.from_json(ref) for event in parts for sample in event.data["caches"] for ref in sample]
        return {"samples": [event.ref for event in parts if event.ref is not None], "caches": caches}

    def rest(self, inputs: dict[str, Sequence[Ref]], **options: Any) -> list[Event]:
        return list(self.function(**options).call(self.call(inputs, "d"), self.context()))

    def joined(self, events: Sequence[Event]) -> SampleBatch:
        refs = [event.ref for event in events if event.ref is not None and event.kind == "samples"]
        return SampleBatch.concat([SampleBatch.decode(self.exchange.get(ref)) for ref in refs]).in_order()


@pytest.fixture
def scene(tmp_path: Path, model_dir: Callable[[str], Path]) -> Scene:
    return Scene(tmp_path, model_dir("llama"))


def value_file(scene: Scene, ref: Ref) -> Path:
    return scene.root / "exchange" / ref.key


@pytest.mark.parametrize("options", [{}, {"engine": "transformers"}, {"deterministic": False}])
def test_what_was_cut_goes_on_without_being_computed_again(scene: Scene, options: dict[str, Any]) -> None:
    options = options if options != {"engine": "transformers"} else options | {"deterministic": False}
    cut = scene.cut(**options)
    parts = [event for event in cut if event.kind == "cut"]
    assert len(parts) == 2
    for event in parts:
        refs = [[Ref.from_json(ref) for ref in sample] for sample in event.data["caches"]]
        assert [len(sample) for sample in refs] == [length > 0 for length in event.data["length"]]
        assert all(ref.key.startswith("caches/c/") for sample in refs for ref in sample)
        for group, index, sample in zip(event.data["group"], event.data["index"], refs, strict=True):
            for ref in sample:
                blob = decode(scene.exchange.get(ref))
                assert (blob.group, blob.index, blob.version) == (group, index, 0)
    assert "cache" not in cut[-1].data
    inputs = scene.inputs(cut)
    more = scene.rest(inputs, **options)
    done = more[-1].data
    unfinished = SampleBatch.concat([SampleBatch.decode(scene.exchange.get(ref)) for ref in inputs["samples"]])
    begun = unfinished.responses.lengths > 0
    tokens = unfinished.prompts.lengths[unfinished.prompt] + unfinished.responses.lengths - 1
    assert begun.all()
    assert done["moved_tokens"] == tokens[begun].sum() > 0
    assert done["moved_s"] > 0
    assert (done["prefill_tokens"], done["shared_tokens"], done["prefill_s"]) == (0, 0, 0.0)
    assert "cache" not in done
    found, wanted = scene.joined([*cut, *more]), scene.uncut()
    assert found.responses.flat.tolist() == wanted.responses.flat.tolist()
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-5)
    if not options:
        assert found.encode() == wanted.encode()


def test_a_sample_may_lie_in_several_objects(scene: Scene) -> None:
    cut = scene.cut()
    inputs = scene.inputs(cut)
    whole = [decode(scene.exchange.get(ref)) for ref in inputs["caches"]]
    names = [(part.group, part.index) for part in whole]
    outbox = Outbox(scene.call(inputs), scene.context(), names, part_bytes=2048)
    for number, part in enumerate(whole):
        nothing = np.zeros(0, np.int32)
        outbox.add(Sample(number, nothing, nothing.astype(np.float32), Finish.UNFINISHED, 0, join([part])))
    outbox.close()
    objects = [outbox.refs(number) for number in range(len(whole))]
    assert min(map(len, objects)) > 1
    more = scene.rest({**inputs, "caches": [ref for refs in objects for ref in refs]})
    assert more[-1].data["moved_tokens"] > 0
    assert more[-1].data["prefill_tokens"] == 0
    assert scene.joined([*cut, *more]).encode() == scene.uncut().encode()


def lose(path: Path) -> None:
    path.unlink()


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("harm", "why"), [(lose, "no such value"), (alter, "checksum differs"), (truncate, "no such value|not those")]
)
@pytest.mark.parametrize("every", [False, True])
def test_what_is_lost_or_altered_is_computed_again_and_said(
    scene: Scene, harm: Callable[[Path], None], why: str, every: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cut = scene.cut()
    inputs = scene.inputs(cut)
    harmed = inputs["caches"][: None if every else 1]
    for ref in harmed:
        harm(value_file(scene, ref))
    more = scene.rest(inputs)
    done = more[-1].data
    assert scene.joined([*cut, *more]).encode() == scene.uncut().encode()
    assert done["cache"].startswith(
        f"computed again: {len(harmed)} of {len(inputs['caches'])} samples that came: caches/c/"
    )
    assert (done["moved_tokens"] == 0) == every
    assert done["prefill_tokens"] > 0
    warnings = [record.getMessage() for record in caplog.records if record.name == moves.__name__]
    assert len(warnings) == 1
    assert "keys and values are missing for" in warnings[0]


def test_none_at_all_is_computed_again_and_said(scene: Scene) -> None:
    cut = scene.cut()
    more = scene.rest({"samples": scene.inputs(cut)["samples"]})
    assert scene.joined([*cut, *more]).encode() == scene.uncut().encode()
    assert more[-1].data["cache"] == "computed again: 12 of 12 samples that came: no keys and values came with them"
    assert more[-1].data["moved_tokens"] == 0


def test_those_of_another_kind_of_engine_are_computed_again_and_said(scene: Scene) -> None:
    cut = scene.cut(deterministic=False)
    more = scene.rest(scene.inputs(cut), deterministic=False, engine="transformers")
    why = "in float32, scaled pairs, the engine wants 2 kv heads x 3 layers x 8 in float32, halves"
    assert more[-1].data["cache"].startswith("computed again: 12 of 12 samples that came: sample (group ")
    assert more[-1].data["cache"].endswith(why)
    assert scene.joined([*cut, *more]).responses.flat.tolist() == scene.uncut().responses.flat.tolist()


def test_a_model_that_cannot_hand_over_says_so(tmp_path: Path, model_dir: Callable[[str], Path]) -> None:
    scene = Scene(tmp_path, model_dir("mistral"))
    cut = scene.cut(engine="transformers", deterministic=False)
    (said,) = [event.data["cache"] for event in cut if event.kind == "done"]
    assert said.startswith(
        "computed again: 12 of 12 samples that were cut: MistralForCausalLM: layer 0 keeps a Dynamic"
    )
    assert scene.inputs(cut)["caches"] == []
    more = scene.rest(scene.inputs(cut), engine="transformers", deterministic=False)
    assert "12 of 12 samples that came: MistralForCausalLM" in more[-1].data["cache"]


def test_those_of_another_version_are_refused(scene: Scene) -> None:
    """Weights that differ under the same samples would go unseen."""
    inputs = scene.inputs(scene.cut())
    (other, *_) = inputs["caches"]
    blob = scene.exchange.get(other).replace(b'"version":"0"', b'"version":"4"')
    inputs = {**inputs, "caches": [scene.exchange.put("other", blob)]}
    with pytest.raises(FatalError, match=r"\(group \d, index \d\) were made by version 4; the call's policy is 0"):
        scene.rest(inputs)


class Full(DirectoryExchange):
    """Has no room for keys and values."""

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        if key.startswith("caches/"):
            raise Unavailable(f"{key}: no room")
        return super().put(key, data, lifetime_s=lifetime_s)


def test_those_that_could_not_be_written_are_computed_again_and_said(scene: Scene) -> None:
    cut = scene.cut(exchange=Full(f"{scene.root}/exchange"))
    said = cut[-1].data["cache"]
    assert said.startswith("computed again: 12 of 12 samples that were cut: caches/c/")
    assert said.endswith("no room")
    assert all(event.data["caches"] == [[]] * 6 for event in cut if event.kind == "cut")
    more = scene.rest(scene.inputs(cut))
    assert scene.joined([*cut, *more]).encode() == scene.uncut().encode()


class Fleeting(DirectoryExchange):
    """Where an hour is over in 4 microseconds."""

    def put(self, key: str, data: Data, *, lifetime_s: float | None = None) -> Ref:
        return super().put(key, data, lifetime_s=None if lifetime_s is None else 1e-9 * lifetime_s)


def test_they_end_by_themselves(scene: Scene) -> None:
    """Where nobody deletes them."""
    inputs = scene.inputs(scene.cut(exchange=Fleeting(f"{scene.root}/exchange")))
    assert inputs["caches"]
    assert scene.exchange.list("caches/") == []


def test_only_what_is_left_is_read_again(scene: Scene) -> None:
    """A second attempt at the call that goes on: its first died when it had handed over some."""
    cut = scene.cut()
    inputs = scene.inputs(cut)
    first = scene.rest(inputs)
    context = Context(scene.exchange, f"{scene.root}/scratch", prior=iter(first[:1]))
    more = list(scene.function().call(scene.call(inputs, "d"), context))
    assert scene.joined([*cut, first[0], *more]).encode() == scene.uncut().encode()
    assert 0 < more[-1].data["moved_tokens"] < first[-1].data["moved_tokens"]
    assert more[-1].data["prefill_tokens"] == 0
