"""A sample that stops, is answered, and goes on: what was said before stays, bit for bit, and is attended to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from functions.base.samples import Finish
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.engine.requests import check_caches
from tests.generate.test_moved import assert_same, cut_after, going_on, made

Requests = Callable[..., list[Request]]
Models = Callable[[str], Path]
SAMPLING = Sampling(40, temperature=0.9, top_p=0.95, seed=11, keep_from=1)


def answered(request: Request, sample: Sample, tokens: int) -> Request:
    """The request for the next turn: `tokens` of an observation after the sample's own, with its keys and values."""
    given = np.arange(5, 5 + tokens, dtype=np.int32)
    response = np.concatenate((sample.response, given))
    logprobs = np.concatenate((sample.logprobs, np.zeros(tokens, np.float32)))
    return replace(going_on(request, sample), response=response, logprobs=logprobs)


def first_turns(engine: Any, requests: list[Request], tokens: int) -> list[Request]:
    stopped = [s for s in engine.generate(requests, SAMPLING, lambda: False) if s.finish == Finish.STOP]
    stopped = [s for s in stopped if len(s.response) + tokens < SAMPLING.max_response_length]
    assert len({len(s.response) for s in stopped}) > 2
    assert all(s.cache is not None for s in stopped)
    assert all(s.cache.tokens == len(requests[s.number].prompt) + len(s.response) - 1 for s in stopped)
    return [answered(requests[s.number], s, tokens) for s in sorted(stopped, key=lambda s: s.number)]


@pytest.mark.parametrize(
    ("kind", "model", "deterministic"),
    [("torch", "llama", False), ("torch", "llama", True), ("torch", "gemma3", True), ("transformers", "llama", False)],
)  # fmt: skip
def test_the_next_turn(kind: str, model: str, deterministic: bool, model_dir: Models, requests_for: Requests) -> None:
    """With its keys and values, without, dealt otherwise, cut in between: the same; its log-probabilities are those of
    a forward pass over the whole text."""
    torch_engine = made("torch", model_dir(model), deterministic=deterministic)
    turn = first_turns(torch_engine, requests_for(4, 6), tokens=3)
    engine = torch_engine if kind == "torch" else made(kind, model_dir(model))
    again = [replace(r, cache=None) for r in turn]
    wanted = {s.number: s for s in engine.generate(again, SAMPLING, lambda: False)}
    others = made(kind, model_dir(model), deterministic=deterministic)
    moved = {
        s.number: s for s in others.generate(turn[::2] if kind == "torch" else again[::2], SAMPLING, lambda: False)
    }
    if kind == "torch":
        assert others.stats.moved_tokens == sum(r.cache.tokens for r in turn[::2] if r.cache is not None)
        assert others.stats.prefill_tokens == 0
    assert_same(moved, {n: wanted[n] for n in moved}, bits=deterministic)
    cut = list(others.generate(turn if kind == "torch" else again, SAMPLING, cut_after(3)))
    left = [going_on(r, s) for r in turn for s in cut if s.number == r.number and s.finish == Finish.UNFINISHED]
    whole = {s.number: s for s in cut if s.finish != Finish.UNFINISHED}
    whole |= {s.number: s for s in others.generate(left, SAMPLING, lambda: False)}
    assert_same(whole, wanted, bits=deterministic)
    reference: Any = AutoModelForCausalLM.from_pretrained(model_dir(model), dtype=torch.float32)
    greedy = replace(SAMPLING, temperature=1.0, top_p=1.0)
    for sample in engine.generate(again[:4], greedy, lambda: False):
        request = next(r for r in turn if r.number == sample.number)
        begun = len(request.response)
        assert sample.response[:begun].tolist() == request.response.tolist()
        assert sample.logprobs[:begun].tobytes() == request.logprobs.tobytes()
        text = torch.from_numpy(np.concatenate((request.prompt, sample.response))).long()
        with torch.no_grad():
            logits = reference(text[None]).logits[0].log_softmax(-1)
        at = len(request.prompt) + begun
        found = logits[at - 1 : -1].gather(1, text[at:, None])[:, 0].numpy()
        np.testing.assert_allclose(sample.logprobs[begun:], found, atol=1e-4)


def test_a_long_observation_is_prefilled(model_dir: Models, requests_for: Requests) -> None:
    engine = made("torch", model_dir("llama"))
    sampling = replace(SAMPLING, max_response_length=110)
    requests = requests_for(2, 4, longest=10)
    stopped = [s for s in engine.generate(requests, sampling, lambda: False) if s.finish == Finish.STOP]
    turn = [answered(requests[s.number], s, 70) for s in stopped if len(s.response) < 30]
    assert turn
    list(engine.generate(turn, sampling, lambda: False))
    assert engine.stats.moved_tokens == 0
    assert engine.stats.prefill_tokens + engine.stats.shared_tokens == sum(
        len(r.prompt) + len(r.response) for r in turn
    )


def test_short_samples_come_without(model_dir: Models, requests_for: Requests) -> None:
    """`keep_from` counts the prompt; samples cut off at the limit never go on."""
    engine, requests = made("torch", model_dir("llama")), requests_for(3, 4)
    samples = list(engine.generate(requests, replace(SAMPLING, keep_from=14), lambda: False))
    assert {s.finish for s in samples} == {Finish.STOP, Finish.LENGTH}
    for sample in samples:
        long = len(requests[sample.number].prompt) + len(sample.response) >= 14
        assert (sample.cache is not None) == (long and sample.finish == Finish.STOP)


def test_keys_and_values_of_another_sample_are_refused(model_dir: Models, requests_for: Requests) -> None:
    engine = made("torch", model_dir("llama"))
    request = first_turns(engine, requests_for(4, 6), tokens=3)[0]
    check_caches([request], engine.cache_layout)
    short = replace(request, response=request.response[:0], logprobs=request.logprobs[:0])
    with pytest.raises(ValueError, match="up to the last but one"):
        check_caches([short], engine.cache_layout)
