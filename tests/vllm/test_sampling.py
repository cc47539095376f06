"""What the engine samples, and with which log-probabilities, against transformers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.base import Sampling
from functions.generate.vllm.engine import VllmEngine
from tests.vllm.samples import CONTEXT, VOCABULARY, Logprobs, random_prompts, requests, run

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(
    engine: VllmEngine, model: Path, logprobs: Logprobs, temperature: float
) -> None:
    wanted = requests(random_prompts(1, [5, 40, 130, 300]), 4)
    found = run(engine, wanted, Sampling(48, temperature=temperature, seed=7, ignore_eos=True))
    worst = 0.0
    for request in wanted:
        sample = found[request.number]
        expected = logprobs(model, request, sample, temperature)
        worst = max(worst, float((torch.tensor(sample.logprobs) - expected).abs().max()))
        assert sample.version == 3
        assert len(sample.response) == 48
    assert worst <= 1e-5


def test_truncated_sampling_reports_the_renormalised_distribution(
    engine: VllmEngine, model: Path, logprobs: Logprobs
) -> None:
    (request,) = wanted = requests(random_prompts(2, [20]))
    sample = run(engine, wanted, Sampling(1, top_k=3, seed=1, ignore_eos=True))[0]
    every = [replace(sample, response=np.array([token], np.int32)) for token in range(VOCABULARY)]
    full = torch.cat([logprobs(model, request, other, 1.0) for other in every])
    top = full.topk(3)
    assert int(sample.response[0]) in top.indices.tolist()
    expected = full[sample.response[0]] - top.values.logsumexp(0)
    assert float(sample.logprobs[0]) == pytest.approx(float(expected), abs=1e-5)


def test_greedy_takes_the_most_probable_token_with_logprobs_at_temperature_one(
    engine: VllmEngine, model: Path, logprobs: Logprobs
) -> None:
    (request,) = wanted = requests(random_prompts(3, [17]))
    sample = run(engine, wanted, Sampling(24, temperature=0.0, ignore_eos=True))[0]
    assert torch.allclose(torch.tensor(sample.logprobs), logprobs(model, request, sample, 1.0), atol=1e-5)
    for position in range(24):
        before = replace(request, prompt=np.concatenate((request.prompt, sample.response[:position])))
        others = [replace(sample, response=np.array([token], np.int32)) for token in range(VOCABULARY)]
        if position in (0, 11, 23):
            assert max(float(logprobs(model, before, o, 1.0)) for o in others) == pytest.approx(
                float(sample.logprobs[position]), abs=1e-5
            )


def test_frequencies_follow_the_distribution_and_positions_are_independent(
    engine: VllmEngine, model: Path, logprobs: Logprobs
) -> None:
    """6000 samples of two tokens. chi^2 of the first token against transformers' probabilities, and of the second
    given the most frequent first: noise that a sample reused at its next position would show there."""
    count = 6000
    (request, *_) = wanted = requests(random_prompts(4, [12]), count)
    found = run(engine, wanted, Sampling(2, seed=11, ignore_eos=True))
    tokens = np.array([found[n].response for n in range(count)])

    def chi2(prompt: np.ndarray, drawn: np.ndarray) -> tuple[float, int]:
        at = replace(request, prompt=prompt)
        others = [replace(found[0], response=np.array([token], np.int32)) for token in range(VOCABULARY)]
        p = torch.cat([logprobs(model, at, other, 1.0) for other in others]).exp().double().numpy()
        expected, seen = p * len(drawn), np.bincount(drawn, minlength=VOCABULARY)
        often = expected >= 5
        expected = np.append(expected[often], expected[~often].sum())
        seen = np.append(seen[often], seen[~often].sum())
        return float(((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum()), len(expected) - 1

    first, freedom = chi2(request.prompt, tokens[:, 0])
    assert first < freedom + 5 * np.sqrt(2 * freedom)
    likeliest = np.bincount(tokens[:, 0]).argmax()
    after = tokens[tokens[:, 0] == likeliest, 1]
    assert len(after) > 300
    second, freedom = chi2(np.append(request.prompt, likeliest).astype(np.int32), after)
    assert second < freedom + 5 * np.sqrt(2 * freedom)


def test_a_sample_is_the_same_alone_and_in_any_batch_and_another_with_another_seed(engine: VllmEngine) -> None:
    wanted = requests(random_prompts(5, [9, 30, 61]), 4)
    sampling = Sampling(40, seed=5, ignore_eos=True)
    together = run(engine, wanted, sampling)
    reverse = run(engine, wanted[::-1], sampling)
    alone = run(engine, wanted[6:7], sampling)
    for request in wanted:
        assert np.array_equal(together[request.number].response, reverse[request.number].response)
    assert np.array_equal(alone[6].response, together[6].response)
    other = run(engine, wanted, replace(sampling, seed=6))
    assert all(not np.array_equal(other[r.number].response, together[r.number].response) for r in wanted)
    of_one_prompt = {together[n].response.tobytes() for n in range(4)}
    assert len(of_one_prompt) == 4


@pytest.mark.parametrize("steps", [1, 13])
def test_a_cut_sample_goes_on_as_if_it_had_not_been_cut(engine: VllmEngine, steps: int) -> None:
    wanted = requests(random_prompts(6, [9, 150]), 3)
    sampling = Sampling(32, seed=5)
    whole = run(engine, wanted, sampling)
    left = steps

    def stop() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    parts = {sample.number: sample for sample in engine.generate(wanted, sampling, stop)}
    unfinished = [r for r in wanted if parts[r.number].finish == Finish.UNFINISHED]
    assert unfinished
    again = [
        replace(r, response=parts[r.number].response, logprobs=parts[r.number].logprobs) for r in reversed(unfinished)
    ]
    assert all(len(r.response) == steps for r in again)
    rest = run(engine, again, sampling)
    for request in wanted:
        sample = rest.get(request.number, parts[request.number])
        expected = whole[request.number]
        assert np.array_equal(sample.response, expected.response)
        assert np.allclose(sample.logprobs, expected.logprobs, atol=1e-5)
        assert sample.finish == expected.finish


def test_a_cut_before_the_first_step_returns_every_sample_as_it_came(engine: VllmEngine) -> None:
    wanted = requests(random_prompts(6, [9, 15]), 2)
    given = np.array([5, 6], np.int32), np.array([-1.0, -2.0], np.float32)
    wanted[1] = replace(wanted[1], response=given[0], logprobs=given[1])
    parts = {sample.number: sample for sample in engine.generate(wanted, Sampling(16), lambda: True)}
    assert len(parts) == 4
    assert all(sample.finish == Finish.UNFINISHED for sample in parts.values())
    assert parts[1].response.tolist() == [5, 6]
    assert parts[1].logprobs.tolist() == [-1.0, -2.0]
    assert not len(parts[0].response)


def test_samples_come_as_they_finish(engine: VllmEngine) -> None:
    """Of samples with 2, 30 and 10 tokens to go the shortest comes first, while the others are still open."""
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return False

    base = requests(random_prompts(7, [10, 10, 10]))
    filler = np.full(32, 9, np.int32)
    wanted = [
        replace(r, response=filler[:given], logprobs=np.zeros(given, np.float32))
        for r, given in zip(base, (30, 2, 22), strict=True)
    ]
    seen = [(sample.number, steps) for sample in engine.generate(wanted, Sampling(32, ignore_eos=True), stop)]
    assert seen == [(0, 2), (2, 10), (1, 30)]


def test_a_response_ends_with_the_first_end_of_sequence_token(engine: VllmEngine) -> None:
    found = run(engine, requests(random_prompts(8, [10, 20, 30, 40]), 16), Sampling(120, seed=2))
    finishes = [sample.finish for sample in found.values()]
    assert Finish.STOP in finishes
    assert Finish.LENGTH in finishes
    for sample in found.values():
        ends = [i for i, token in enumerate(sample.response) if token in (1, 2)]
        assert ends == ([len(sample.response) - 1] if sample.finish == Finish.STOP else [])
        assert sample.finish == Finish.STOP or len(sample.response) == 120


def test_a_response_that_is_full_already_comes_back_unchanged(engine: VllmEngine) -> None:
    (request,) = requests(random_prompts(9, [10]))
    full = replace(request, response=np.full(4, 9, np.int32), logprobs=np.full(4, -1.5, np.float32))
    sample = run(engine, [full], Sampling(4))[0]
    assert sample.finish == Finish.LENGTH
    assert sample.response.tolist() == [9] * 4
    assert sample.logprobs.tolist() == [-1.5] * 4


def test_prompts_longer_than_a_step_are_prefilled_in_parts(engine: VllmEngine, model: Path, logprobs: Logprobs) -> None:
    """vLLM's own sampler fails here on a CPU when requests have seeds."""
    wanted = requests(random_prompts(10, [CONTEXT - 8, CONTEXT - 8]))
    found = run(engine, wanted, Sampling(8, seed=3, ignore_eos=True))
    alone = run(engine, wanted[1:], Sampling(8, seed=3, ignore_eos=True))
    assert np.array_equal(alone[1].response, found[1].response)
    expected = logprobs(model, wanted[1], found[1], 1.0)
    assert torch.allclose(torch.tensor(found[1].logprobs), expected, atol=3e-5)


def test_samples_of_a_prompt_share_its_prefix_and_the_counts_add_up(engine: VllmEngine) -> None:
    wanted = requests(random_prompts(11, [300]), 8)
    run(engine, wanted, Sampling(10, seed=1, ignore_eos=True))
    stats = engine.stats
    assert stats.prefill_tokens + stats.shared_tokens == 8 * 300
    assert stats.shared_tokens >= 7 * 256
    assert stats.decode_tokens == 8 * 9
    assert stats.decode_steps <= 10


def test_a_caller_that_goes_away_leaves_an_idle_engine(engine: VllmEngine, model: Path) -> None:
    stream = engine.generate(requests(random_prompts(12, [10, 400]), 4), Sampling(64, seed=1), lambda: False)
    assert isinstance(stream, Generator)
    next(stream)
    stream.close()
    engine.load(Version("policy", 4), model)  # raises if blocks are still in use
    sample = run(engine, requests(random_prompts(12, [10])), Sampling(4))[0]
    assert sample.version == 4


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"sample \(group 0, index 0\) has an empty prompt"),
        ([5] * (CONTEXT - 7), r"sample \(group 0, index 0\): .* exceeds the model's context of 8192"),
        ([5, VOCABULARY], r"sample \(group 0, index 0\): its prompt has token 160, the model's vocabulary has 160"),
    ],
)
def test_a_request_that_does_not_fit_is_named(engine: VllmEngine, prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(engine, requests([prompt]), Sampling(8))
