"""Streams against SplitMix64 by hand; distributions against transformers' warpers and by their properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from functions.generate.engine.base import Sampling
from functions.generate.engine.sampling import distribution, draw, stream_keys, uniforms

MASK = (1 << 64) - 1


def split_mix(state: int, count: int) -> list[int]:
    """The generator as published: state += gamma, mixed."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(z ^ (z >> 31))
    return found


def test_uniforms_are_split_mix_64() -> None:
    # First outputs for seed 1234567, as in the test vectors that other implementations use.
    assert split_mix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    keys = np.full(50, 1234567, np.uint64)
    wanted = np.array([z >> 40 for z in split_mix(1234567, 50)]) / 2**24
    assert uniforms(keys, np.arange(50)).tolist() == wanted.tolist()


def test_streams_differ_between_samples_and_seeds() -> None:
    group, index = np.divmod(np.arange(4000), 8)
    keys = np.concatenate([stream_keys(seed, group, index) for seed in (0, 1, -1)])
    assert len(set(keys.tolist())) == len(keys)
    first = uniforms(keys, np.zeros(len(keys), np.int64))
    # Means of 12,000 uniforms have a standard error of 0.0026; neighbours are uncorrelated.
    assert abs(first.mean() - 0.5) < 0.012
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.04


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (0.8, 9, 0.6), (1.0, 0, 0.3)]
)
def test_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(20, 31, generator=torch.Generator().manual_seed(0))
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    found = distribution(logits, Sampling(1, temperature, top_p, top_k))
    torch.testing.assert_close(found, wanted.log_softmax(-1), atol=2e-6, rtol=0)


def test_greedy_takes_the_first_of_the_likeliest_with_log_probabilities_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 0.0]])
    token, logprob = draw(logits, torch.tensor([0.99, 0.99]), Sampling(1, temperature=0.0))
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(logprob, logits.log_softmax(-1)[torch.arange(2), token])


def test_frequencies_are_the_probabilities() -> None:
    """A regular grid of 4096 uniform numbers gives each token its probability up to one grid cell on either side."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)).expand(4096, -1)
    token, _ = draw(logits, (torch.arange(4096) + 0.5) / 4096, Sampling(1))
    frequency = torch.bincount(token, minlength=12) / 4096
    torch.testing.assert_close(frequency, logits[0].softmax(-1), atol=1.01 / 4096, rtol=0)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    uniform=st.sampled_from([0.0, 2.0**-24, 0.5, 1 - 2.0**-24]),
    temperature=st.sampled_from([0.05, 1.0, 4.0]),
    top_k=st.integers(0, 5),
    top_p=st.sampled_from([1e-6, 0.5, 0.999, 1.0]),
)
def test_a_token_that_is_left_out_is_never_drawn(
    seed: int, uniform: float, temperature: float, top_k: int, top_p: float
) -> None:
    logits = 20 * torch.randn(4, 50, generator=torch.Generator().manual_seed(seed))
    logits[:, ::7] = -torch.inf
    sampling = Sampling(1, temperature, top_p, top_k)
    token, logprob = draw(logits, torch.full((4,), uniform), sampling)
    assert torch.isfinite(logprob).all()
    assert torch.equal(logprob, distribution(logits, sampling)[torch.arange(4), token])
