"""Chunked log-probabilities and entropy equal the naive form in value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functions.algorithms.logprobs import Output, kept_mass, token_logprobs
from functions.algorithms.truncation import Truncation
from functions.generate.engine.base import Sampling
from functions.generate.engine.sampling import distribution


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    chunk=st.integers(1, 8),
    temperature=st.sampled_from([1.0, 0.6, 1.5]),
    softcap=st.sampled_from([None, 3.0, 30.0]),
    with_bias=st.booleans(),
    parts=st.sampled_from(["logprobs", "entropy", "both"]),
)
def test_equals_the_naive_form(
    seed: int, tokens: int, chunk: int, temperature: float, softcap: float | None, with_bias: bool, parts: str
) -> None:
    rng = torch.Generator().manual_seed(seed)

    def leaf(scale: float, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=rng) * scale).requires_grad_()

    hidden, weight = leaf(1.0, tokens, 8), leaf(0.4, 31, 8)
    bias = leaf(1.0, 31) if with_bias else None
    targets = torch.randint(31, (tokens,), generator=rng)
    up = torch.randn(tokens, generator=rng), torch.randn(tokens, generator=rng)
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    results = []
    for logprobs, entropy in (
        naive(hidden, weight, bias, targets, temperature, softcap),
        token_logprobs(
            hidden=hidden,
            output=Output(weight=weight, bias=bias, temperature=temperature, softcap=softcap),
            targets=targets,
            chunk_tokens=chunk,
        ),
    ):
        loss = (logprobs * up[0]).sum() * (parts != "entropy") + (entropy * up[1]).sum() * (parts != "logprobs")
        loss = loss / max(tokens, 1)
        results.append([logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)])
    for expected, actual in zip(*results, strict=True):
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(actual, expected, atol=1e-6 * scale, rtol=0)


@pytest.mark.parametrize("truncation", [(0.5, 3), (0.7, 0), (1.0, 2), (0.9, 31), (1.0, 0)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_mass_that_is_kept(truncation: tuple[float, int], temperature: float) -> None:
    """Counted token by token, from the most probable one on; and what the engine samples from is p over that mass."""
    top_p, top_k = truncation
    rng = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((20, 8), (31, 8), (31,)))
    logits = (hidden @ weight.T + bias).double() / temperature
    expected = []
    for p in logits.softmax(-1):
        kept = sorted(p.tolist(), reverse=True)[: top_k or 31]
        shares = [value / sum(kept) for value in kept]
        expected.append(math.log(sum(v for i, v in enumerate(kept) if sum(shares[:i]) < top_p)))
    mass = kept_mass(
        hidden=hidden, output=Output(weight=weight, bias=bias, temperature=temperature),
        truncation=Truncation(*truncation), chunk_tokens=7,
    )  # fmt: skip
    assert mass.tolist() == pytest.approx(expected, abs=5e-6)
    sampled = distribution((hidden @ weight.T + bias), Sampling(1, temperature, top_p, top_k))
    inside = sampled.isfinite()
    apart = (logits.log_softmax(-1) - mass[:, None] - sampled)[inside]
    assert float(apart.abs().max()) < 1e-5


def test_only_the_entropy_in_the_loss() -> None:
    """`entropy` alone backpropagates (an entropy bonus is differentiable) with no gradient handed to the logprobs."""
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float32).requires_grad_()
    weight = torch.randn(9, 4)
    targets = torch.arange(5)
    _, entropy = token_logprobs(hidden=hidden, output=Output(weight=weight), targets=targets, chunk_tokens=2)
    (actual,) = torch.autograd.grad(entropy.sum(), hidden)
    (expected,) = torch.autograd.grad(naive(hidden, weight, None, targets, 1.0, None)[1].sum(), hidden)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    assert float(expected.norm()) > 0.1


def test_bfloat16_states_give_float32_values_close_to_exact() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 16).bfloat16().requires_grad_()
    weight = torch.randn(40, 16).bfloat16().requires_grad_()
    targets = torch.arange(6)
    logprobs, entropy = token_logprobs(hidden=hidden, output=Output(weight=weight), targets=targets, chunk_tokens=4)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected, _ = naive(hidden.float(), weight.float(), None, targets, 1.0, None)
    torch.testing.assert_close(logprobs, expected, atol=0.05, rtol=0)
    actual = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    wanted = torch.autograd.grad(expected.sum(), [hidden, weight])
    for mine, exact in zip(actual, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine.float() - exact.float()).norm() / exact.float().norm()) < 0.02


def test_a_frozen_output_embedding_gets_no_gradient() -> None:
    hidden = torch.randn(3, 4).requires_grad_()
    weight = torch.randn(5, 4)
    logprobs, _ = token_logprobs(hidden=hidden, output=Output(weight=weight), targets=torch.tensor([0, 1, 2]))
    torch.autograd.backward(logprobs.sum())
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 9])}, r"targets: 9 at token 1 is not in \[0, 5\)"),
        ({"temperature": 0.0}, "temperature: must be above 0"),
        ({"softcap": -1.0}, "softcap: must be above 0"),
        ({"weight": torch.ones(5, 3)}, r"must be \[N, H\] and \[V, H\]"),
        ({"targets": torch.tensor([0])}, r"targets: shape \(1,\) must be \[2\]"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    given = {"weight": torch.ones(5, 4), "targets": torch.tensor([0, 1])} | change
    targets = given.pop("targets")
    with pytest.raises(ValueError, match=message):
        token_logprobs(hidden=torch.ones(2, 4), output=Output(**given), targets=targets)  # type: ignore[arg-type]
