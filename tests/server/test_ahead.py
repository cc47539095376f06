"""What a replica loads before its first call, against real server processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from functions.base.samples import Finish, Ragged, SampleBatch
from functions.base.wire import LEASES, Call, Event, Hint, Load, Version, hint_key
from functions.call.function import Context
from functions.call.meter import Told
from functions.exchange.directory import DirectoryExchange
from functions.generate.function import GenerateFunction
from functions.models.pretrained import load_causal_lm, load_critic, save_model
from functions.weights.base import import_model
from functions.weights.delta import difference
from functions.weights.manifest import read_manifest
from functions.weights.store import blobs, fetch
from tests.support import waiting
from tests.support.tiny_job import make_model
from tests.support.versions import publish

if TYPE_CHECKING:
    from tests.server.conftest import Serve, Served

POLICY = Version("actor", 3, "c")
until = partial(waiting.until, within_s=60)
"""Torch is imported, and a model loaded."""
DETERMINISTIC = ["--function", "generate", "--options", '{"deterministic": true}']


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(str(tmp_path / "exchange" / "job"))


@pytest.fixture
def policy(exchange: DirectoryExchange, tmp_path: Path) -> Version:
    make_model(tmp_path / "model")
    return import_model(exchange, "actor", tmp_path / "model")


def hint(exchange: DirectoryExchange, function: str, *loads: Load, epoch: int = 1) -> None:
    exchange.put(hint_key(function), json.dumps(Hint(epoch, loads).to_json()).encode())


def generate(exchange: DirectoryExchange, policy: Version, name: str = "c") -> Call:
    batch = SampleBatch.of_prompts([[3, 4, 5], [6, 7]], samples_per_prompt=2, version=policy.number)
    samples = exchange.put(f"batches/{name}", batch.encode())
    params = {"max_response_length": 8, "seed": 1, "ignore_eos": True}
    return Call(name, "generate", {"samples": [samples]}, {"policy": policy}, params)


def messages(served: Served, word: str) -> list[str]:
    """The messages with `word` in the replica's log."""
    lines = [json.loads(line)["message"] for line in served.log.read_text().splitlines()]
    return [message for message in lines if word in message]


def told(served: Served, call: Call) -> tuple[Event, Told]:
    """`done`, and what the call's meter says."""
    with served.stream(call) as events:
        *_, meter, done = events
    assert done.kind == "done", done
    return done, Told.from_json(meter.data["meter"])


def samples(exchange: DirectoryExchange, events: Iterable[Event]) -> bytes:
    refs = [event.ref for event in events if event.kind == "samples" and event.ref is not None]
    return SampleBatch.concat([SampleBatch.decode(exchange.get(ref)) for ref in refs]).in_order().encode()


def sampled_here(exchange: DirectoryExchange, call: Call, scratch: Path, dtype: str = "float32") -> bytes:
    """What `call` samples where nothing is loaded ahead."""
    function = GenerateFunction(dtype=dtype, deterministic=True)
    return samples(exchange, list(function.call(call, Context(exchange, str(scratch / "here")))))


def weights_bytes(exchange: DirectoryExchange, version: Version) -> int:
    return read_manifest(exchange, version).size_bytes


def test_the_policy_is_there_before_the_first_call_and_is_fetched_once(
    serve: Serve, exchange: DirectoryExchange, policy: Version, tmp_path: Path
) -> None:
    first = sampled_here(exchange, generate(exchange, policy, "here"), tmp_path)
    hint(exchange, "generate", Load("generate", {"policy": policy}))
    served = serve("generate", *DETERMINISTIC)
    until(lambda: messages(served, "loaded ahead"))
    size = weights_bytes(exchange, policy)
    assert exchange.delete(policy.prefix) > 0, "it must need them no more"
    done, meter = told(served, generate(exchange, policy))
    assert done.data["loaded_ahead_s"] > 0
    assert done.data["load_s"] >= 0
    assert not {"fetch", "load", "start engine"} & {span.name for span in meter.spans}
    assert size <= meter.bytes_in < 2 * size, "what was loaded for the call is in its books, once"
    assert "loaded_ahead_s" not in told(served, generate(exchange, policy, "again"))[0].data
    assert samples(exchange, served.call(generate(exchange, policy, "same"))) == first


def test_several_models_are_loaded_in_turn(
    serve: Serve, exchange: DirectoryExchange, policy: Version, tmp_path: Path
) -> None:
    save_model(load_critic(tmp_path / "model"), tmp_path / "critic")
    critic = import_model(exchange, "critic", tmp_path / "critic")
    hint(exchange, "reference", Load("logprobs", {"model": policy}), Load("values", {"model": critic}))
    served = serve("reference")
    until(lambda: len(messages(served, "loaded ahead")) == 2)
    batch = SampleBatch.of_prompts([[3, 4]], samples_per_prompt=1, version=0)
    batch = replace(batch, responses=Ragged.from_rows([[5, 6]], np.int32), logprobs=np.zeros(2, np.float32),
                    mask=np.ones(2, np.float32), finish=np.array([Finish.LENGTH], np.int32))  # fmt: skip
    finished = exchange.put("batches/finished", batch.encode())
    for version in (policy, critic):
        exchange.delete(version.prefix)
    done, _ = told(served, Call("l", "logprobs", {"samples": [finished]}, {"model": policy}))
    assert done.data["loaded_ahead_s"] > 0
    done, _ = told(served, Call("v", "values", {"samples": [finished]}, {"model": critic}))
    assert "loaded_ahead_s" not in done.data
    assert done.data["load_s"] >= 0


LOAD = Load("one", {"policy": POLICY}).to_json()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "nothing to load ahead: there is no hints/slow"),
        (b"{", "nothing to load ahead: hints/slow: Expecting property name"),
        (b"[]", "nothing to load ahead: hints/slow: not a Hint: Input should be"),
        (
            b'{"epoch": 2, "loads": [{}]}',
            "nothing to load ahead: hints/slow: not a Hint: loads: 0: operation: Field required",
        ),
        (
            {"epoch": 2, "loads": [LOAD | {"weights": {"policy": 3}}]},
            "not a Hint: loads: 0: weights: policy: Input should be",
        ),
        ({"epoch": 1, "loads": [LOAD]}, "hints/slow is stale: of epoch 1, the lease has epoch 2"),
        ({"epoch": 2, "loads": [LOAD | {"operation": "odd"}, LOAD]}, "not loaded ahead: division by zero"),
    ],
    ids=["missing", "json", "form", "load", "version", "stale", "fails"],
)
def test_a_hint_that_cannot_be_followed_is_named_in_one_line(
    serve: Serve, exchange: DirectoryExchange, value: Any, message: str
) -> None:
    exchange.put(f"{LEASES}000002", b"somebody")
    if value is not None:
        exchange.put(hint_key("slow"), value if isinstance(value, bytes) else json.dumps(value).encode())
    served = serve("Loads", "--function", "slow")
    until(lambda: messages(served, "ahead"))
    done, _ = told(served, Call("c", "any"))
    assert done.data == {"held": [], "load_s": done.data["load_s"], "loaded_ahead_s": 0.0}
    lines = messages(served, "")
    assert message in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == ["any begins", "any ends"]


def test_a_version_that_is_gone_is_left_to_the_call(serve: Serve, exchange: DirectoryExchange, policy: Version) -> None:
    hint(exchange, "generate", Load("generate", {"policy": POLICY}))
    served = serve("generate", *DETERMINISTIC)
    until(lambda: messages(served, "ahead"))
    [line] = messages(served, "ahead")
    assert line.startswith("generate: policy actor v000003 not loaded ahead: ")
    assert "v000003.c: no manifest" in line
    done, meter = told(served, generate(exchange, policy))
    assert done.data["loaded_ahead_s"] == 0.0
    assert done.data["load_s"] > 0
    assert {"fetch", "load", "start engine"} <= {span.name for span in meter.spans}


def test_a_function_that_holds_no_models_looks_for_no_hint(serve: Serve) -> None:
    served = serve("Count", "--function", "generate")
    assert served.call(Call("c", "count", params={"n": 1}))[-1].kind == "done"
    assert not messages(served, "ahead")


def test_a_call_for_the_next_version_brings_its_delta_alone(
    serve: Serve, exchange: DirectoryExchange, tmp_path: Path
) -> None:
    make_model(tmp_path / "wide")
    save_model(load_causal_lm(tmp_path / "wide", dtype=torch.bfloat16), tmp_path / "model")
    base = import_model(exchange, "actor", tmp_path / "model")
    old = fetch(exchange, base)
    new = {name: torch.where(torch.rand(t.shape) < 0.05, t * 3 + 0.25, t) for name, t in old.items()}
    delta = difference(read_manifest(exchange, base), blobs(old), blobs(new))
    assert delta is not None
    version = Version("actor", 1, "c1")
    publish(exchange, version, tensors=new, state={}, trainer={}, model_files=None, parent=base, delta=delta.parts)
    options = ["--function", "generate", "--options", '{"deterministic": true, "dtype": "bfloat16"}']
    first = sampled_here(exchange, generate(exchange, version, "here"), tmp_path, dtype="bfloat16")
    hint(exchange, "generate", Load("generate", {"policy": base}))
    served = serve("generate", *options)
    until(lambda: messages(served, "loaded ahead"))
    call = generate(exchange, version)
    done, meter = told(served, call)
    assert "fetch delta" in {span.name for span in meter.spans}
    assert done.data["loaded_ahead_s"] > 0
    assert done.data["load_s"] > 0
    assert samples(exchange, served.call(generate(exchange, version, "again"))) == first


# --- while it loads --------------------------------------------------------------------------------------------------


def loading(serve: Serve, exchange: DirectoryExchange, release: Path) -> Served:
    """A replica that loads until the file `release` is there."""
    hint(exchange, "slow", Load("one", {"a": POLICY}), Load("two", {"b": Version("critic", 1)}))
    served = serve("Loads", "--function", "slow", "--options", json.dumps({"until": str(release)}))
    until(lambda: messages(served, "loading one"))
    return served


def test_a_call_waits_for_what_is_being_loaded_and_for_no_more(
    serve: Serve, exchange: DirectoryExchange, tmp_path: Path
) -> None:
    served = loading(serve, exchange, tmp_path / "release")
    with served.stream(Call("c", "any")) as events:
        seen = [next(events), next(events), next(events)]
        assert [event.kind for event in seen] == ["started", "progress", "progress"], "ready, with a beating heart"
        (tmp_path / "release").touch()
        *_, meter, done = events
    assert done.data["held"] == [POLICY.prefix], "the second load of the hint is left to the calls"
    assert done.data["load_s"] >= 0.1  # it was there for two heartbeats
    assert done.data["loaded_ahead_s"] >= 0
    spans = {span.name: span for span in Told.from_json(meter.data["meter"]).spans}
    assert 0 <= spans["load"].start_s < (spans["load"].stop_s or 0) <= (spans["any"].stop_s or 0)
    assert spans["load"].parent == spans["any"].id


@pytest.mark.parametrize("called", [False, True], ids=["idle", "after a call that was closed"])
def test_sigterm_ends_a_replica_that_loads_at_once(
    serve: Serve, exchange: DirectoryExchange, tmp_path: Path, called: bool
) -> None:
    served = loading(serve, exchange, tmp_path / "never")
    if called:
        with served.stream(Call("c", "any")) as events:
            next(events)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(100) == 0
    assert messages(served, "told to go while it loads: exit")


def test_sigterm_leaves_an_open_call_its_load(serve: Serve, exchange: DirectoryExchange, tmp_path: Path) -> None:
    served = loading(serve, exchange, tmp_path / "release")
    with served.stream(Call("c", "any")) as events:
        assert next(events).kind == "started"
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.client.get("/healthz/ready").status_code == 503)
        (tmp_path / "release").touch()
        assert [event.kind for event in events][-1] == "done"
    assert served.process.wait(100) == 0


def test_a_load_that_breaks_the_replica_ends_it(exchange: DirectoryExchange, serve: Serve) -> None:
    hint(exchange, "slow", Load("broken", {"a": POLICY}))
    served = serve.start("Loads", "--function", "slow")
    assert served.process.wait(100) == 0
    assert messages(served, "ahead") == ["broken: a actor v000003 not loaded ahead: half of the weights are new"]
