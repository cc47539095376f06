"""Samples that go on elsewhere with the keys and values that they had are those that were never cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.base import Engine, Request, Sample, Sampling
from functions.generate.engine.keys_values import KeysValues, Layout, decode, encode, join
from functions.generate.torch.engine import TorchEngine
from functions.generate.torch.transformers_engine import TransformersEngine

Requests = Callable[..., list[Request]]
Models = Callable[[str], Path]
SAMPLING = Sampling(24, temperature=0.9, top_p=0.95, seed=11)
ENGINES: dict[str, type[TorchEngine] | type[TransformersEngine]] = {
    "torch": TorchEngine,
    "transformers": TransformersEngine,
}


def made(kind: str, directory: Path, *, slots: int = 8, deterministic: bool = False) -> Engine:
    torch.set_num_threads(1)
    engine = ENGINES[kind](dtype=torch.float32, device=torch.device("cpu"), slots=slots, deterministic=deterministic)
    engine.load(Version("policy", 0), directory)
    return engine


def cut_after(steps: int) -> Callable[[], bool]:
    looks: Iterator[int] = iter(range(10**9))
    return lambda: next(looks) >= steps


def going_on(request: Request, sample: Sample) -> Request:
    """As the exchange would bring it."""
    cache = sample.cache
    if cache is not None:
        blobs = [b"".join(part) for part in encode(cache, version=0, group=request.group, index=request.index)]
        cache = join([decode(blob) for blob in blobs])
    return replace(request, response=sample.response, logprobs=sample.logprobs, cache=cache)


def split(requests: Sequence[Request], samples: Sequence[Sample]) -> tuple[dict[int, Sample], list[Request]]:
    """What is finished, and what is left to go on with."""
    by_number = {r.number: r for r in requests}
    left = [going_on(by_number[s.number], s) for s in samples if s.finish == Finish.UNFINISHED]
    return {s.number: s for s in samples if s.finish != Finish.UNFINISHED}, left


def assert_same(found: dict[int, Sample], wanted: dict[int, Sample], *, bits: bool) -> None:
    assert found.keys() == wanted.keys()
    for number, sample in wanted.items():
        assert found[number].response.tolist() == sample.response.tolist()
        assert found[number].finish == sample.finish
        if bits:
            assert found[number].logprobs.tobytes() == sample.logprobs.tobytes()
        else:
            np.testing.assert_allclose(found[number].logprobs, sample.logprobs, atol=2e-5)


def check_stats(engine: Engine, requests: Sequence[Request], unfinished: Sequence[Request]) -> None:
    """What came with its keys and values is moved, not prefilled; all others are prefilled or shared."""
    waiting = {r.number for r in unfinished if not len(r.response)}
    stats, fresh = engine.stats, [r for r in requests if r.cache is None and r.number not in waiting]
    assert stats.prefill_tokens + stats.shared_tokens == sum(len(r.prompt) for r in fresh)
    assert (stats.prefill_s > 0) == bool(fresh)
    untouched = [
        r for r in unfinished if any(len(q.response) == len(r.response) for q in requests if q.number == r.number)
    ]
    tokens = sum(r.cache.tokens for r in requests if r.cache is not None)
    assert stats.moved_tokens == tokens - sum(r.cache.tokens for r in untouched if r.cache is not None)
    assert (stats.moved_s > 0) == (stats.moved_tokens > 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("kind", "model"),
    [("torch", "llama"), ("torch", "qwen3"), ("torch", "gemma3"), ("torch", "mistral"),
     ("transformers", "llama"), ("transformers", "gpt2")],
)  # fmt: skip
def test_moved_samples_are_those_that_were_never_cut(
    kind: str, model: str, deterministic: bool, model_dir: Models, requests_for: Requests
) -> None:
    """Cut twice, the samples of a prompt dealt to different engines each time; the second cut catches some that have
    waited all along and some in their first token."""
    requests = requests_for(4, 5)
    engines = [made(kind, model_dir(model), deterministic=deterministic) for _ in range(2)]
    wanted = {s.number: s for s in engines[0].generate(requests, SAMPLING, lambda: False)}
    assert len({len(s.response) for s in wanted.values()}) > 3
    steps = 40 if kind == "transformers" and deterministic else 5  # batches of one look more often
    found, left = split(requests, list(engines[0].generate(requests, SAMPLING, cut_after(steps))))
    begun = [r for r in left if len(r.response)]
    assert begun
    assert len(begun) < len(left), "none was cut before its first token"
    assert all((r.cache is not None) == bool(len(r.response)) for r in left)
    moved = 0
    for stop in (cut_after(3), cut_after(3), lambda: False, lambda: False):
        engine = engines.pop(0)
        part, left = left[::2], left[1::2]
        done, rest = split(part, list(engine.generate(part, SAMPLING, stop)))
        found, engines, left = found | done, [*engines, engine], [*left, *rest]
        check_stats(engine, part, rest)
        moved += engine.stats.moved_tokens
    assert moved > sum(r.cache.tokens for r in begun if r.cache is not None)
    found |= split(left, list(engines[0].generate(left, SAMPLING, lambda: False)))[0]
    assert_same(found, wanted, bits=deterministic)


@pytest.mark.parametrize("kind", ["torch", "transformers"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sample_cut_after_its_first_token(
    kind: str, deterministic: bool, model_dir: Models, requests_for: Requests
) -> None:
    """Its keys and values are those of the prompt alone."""
    requests = requests_for(1, 1)
    engine = made(kind, model_dir("llama"), deterministic=deterministic)
    wanted = {s.number: s for s in engine.generate(requests, SAMPLING, lambda: False)}
    (sample,) = engine.generate(requests, SAMPLING, cut_after(1))
    assert len(sample.response) == 1
    assert sample.cache is not None
    assert sample.cache.tokens == len(requests[0].prompt)
    found, _ = split(requests, list(engine.generate([going_on(requests[0], sample)], SAMPLING, lambda: False)))
    assert_same(found, wanted, bits=deterministic)
    assert engine.stats.prefill_tokens == 0
    assert engine.stats.decode_tokens == len(wanted[0].response) - 1


def reference(directory: Path, request: Request, response: np.ndarray) -> torch.Tensor:
    """By a forward pass of transformers over the whole text: [kv heads, layers, 2, tokens, D]."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.from_numpy(np.concatenate((request.prompt, response[:-1]))).long()[None]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    pairs: list[torch.Tensor] = [torch.stack((layer.keys[0], layer.values[0]), 1) for layer in cache.layers]
    return torch.stack(pairs, 1)


def unpaired(keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Keys in scaled pairs as transformers has them, written independently: [x0 y0 x1 y1 ..] to [x0 x1 .. y0 y1 ..]."""
    return torch.cat((keys[..., 0::2], keys[..., 1::2]), -1) / math.sqrt(scale)


@pytest.mark.parametrize(
    ("kind", "model"), [("torch", "llama"), ("torch", "qwen3"), ("transformers", "llama"), ("transformers", "gpt2")]
)
def test_they_are_transformers_own(kind: str, model: str, model_dir: Models, requests_for: Requests) -> None:
    requests = requests_for(3, 2)
    engine = made(kind, model_dir(model))
    samples = [s for s in engine.generate(requests, SAMPLING, cut_after(6)) if s.finish == Finish.UNFINISHED]
    assert len(samples) > 2
    for sample in samples:
        assert sample.cache is not None
        assert sample.cache.layout == engine.cache_layout
        ours = sample.cache.tensor.clone()
        if kind == "torch":
            ours[:, :, 0] = unpaired(ours[:, :, 0], ours.shape[-1] ** -0.5)
        torch.testing.assert_close(
            ours, reference(model_dir(model), requests[sample.number], sample.response), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("model", ["mistral", "gemma3"])
def test_a_model_whose_cache_is_not_whole_says_so(model: str, model_dir: Models, requests_for: Requests) -> None:
    """transformers drops what has left a sliding window; the samples come without, and are computed again."""
    engine = made("transformers", model_dir(model))
    assert "DynamicSlidingWindowLayer" in str(engine.cache_layout)
    requests = requests_for(2, 2)
    wanted = {s.number: s for s in engine.generate(requests, SAMPLING, lambda: False)}
    found, left = split(requests, list(engine.generate(requests, SAMPLING, cut_after(4))))
    assert left
    assert all(r.cache is None for r in left)
    found |= split(left, list(engine.generate(left, SAMPLING, lambda: False)))[0]
    assert engine.stats.moved_tokens == 0
    assert_same(found, wanted, bits=False)


def test_the_layout_is_the_models(model_dir: Models) -> None:
    assert made("torch", model_dir("qwen3")).cache_layout == Layout(2, 3, 16, torch.float32, "scaled pairs")
    assert made("transformers", model_dir("qwen3")).cache_layout == Layout(2, 3, 16, torch.float32)


def test_a_wrong_key_would_be_seen(model_dir: Models, requests_for: Requests) -> None:
    """What is moved is what is used: with other values the sample goes on otherwise."""
    requests = requests_for(1, 1)
    engine = made("torch", model_dir("llama"))
    wanted = {s.number: s for s in engine.generate(requests, SAMPLING, lambda: False)}
    (sample,) = engine.generate(requests, SAMPLING, cut_after(3))
    assert sample.cache is not None
    other = replace(sample, cache=KeysValues(sample.cache.tensor.flip(1), "scaled pairs"))
    (found,) = engine.generate([going_on(requests[0], other)], SAMPLING, lambda: False)
    assert found.response[3:].tolist() != wanted[0].response[3:].tolist()
