"""Packed forward passes against transformers' own, one sample at a time: values and gradients, every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from functions.base.samples import Finish, Ragged, SampleBatch
from functions.models.forward import (
    SHARED_ARCHITECTURES,
    output_head,
    pack_logprobs,
    pack_values,
    shares_prefix,
)
from functions.models.packing import make_packs
from functions.models.pretrained import load_causal_lm, load_critic, save_model, score_head
from tests.support.architectures import SMALL, VOCABULARY, tiny_model


def samples(seed: int = 0, groups: int = 3, n: int = 4, longest: int = 33) -> SampleBatch:
    """Ragged prompts and responses, some of one token, one of none."""
    rng = np.random.default_rng(seed)
    base = SampleBatch.of_prompts(
        [rng.integers(3, VOCABULARY, rng.integers(1, 6)).tolist() for _ in range(groups)],
        samples_per_prompt=n,
        version=0,
    )
    lengths = rng.integers(1, longest, groups * n)
    lengths[[1, 2]] = 0, 1
    total = int(lengths.sum())
    return SampleBatch(
        prompts=base.prompts, prompt=base.prompt, group=base.group, index=base.index,
        responses=Ragged(rng.integers(3, VOCABULARY, total).astype(np.int32), lengths.astype(np.int32)),
        logprobs=np.full(total, -4.0, np.float32), mask=np.ones(total, np.float32),
        finish=np.full(groups * n, Finish.STOP, np.int32), version=base.version,
    )  # fmt: skip


def naive_logprobs(model: PreTrainedModel, batch: SampleBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Each sample alone through the whole model, log_softmax over its logits: (log-probabilities, entropy) [N]."""
    model.set_attn_implementation("eager")
    logprobs, entropy = [], []
    for row, response in enumerate(batch.responses.rows()):
        if not len(response):
            continue
        prompt = batch.prompts.rows()[batch.prompt[row]]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        log_p = torch.log_softmax(logits, -1)
        logprobs.append(log_p.gather(1, tokens[len(prompt) :, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropy)


def packed_logprobs(
    model: PreTrainedModel, batch: SampleBatch, temperature: float, budget: int, shared: bool
) -> tuple[Tensor, Tensor]:
    packs = make_packs(batch, range(len(batch)), budget_tokens=budget, shared=shared)
    head = output_head(model)
    parts = [pack_logprobs(model, head, pack, temperature) for pack in packs]
    places = torch.cat([pack.flat for pack in packs])
    assert torch.equal(places.sort().values, torch.arange(int(batch.responses.lengths.sum())))
    order = places.argsort()
    return torch.cat([p[0] for p in parts])[order], torch.cat([p[1] for p in parts])[order]


def gradients(model: PreTrainedModel, logprobs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(logprobs))
    loss = (logprobs * weights).mean() + 0.3 * entropy.mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", sorted(SHARED_ARCHITECTURES))
def test_packs_equal_single_samples_in_value_and_gradient(kind: str, tmp_path: Path) -> None:
    model = load_causal_lm(tiny_model(kind, tmp_path))
    batch = samples()
    assert shares_prefix(model.config, 40)
    expected = naive_logprobs(model, batch, 0.7)
    assert float(expected[0].detach().std()) > 0.2  # the model is far from uniform
    wanted = gradients(model, *expected)
    for shared, budget in ((True, 10_000), (True, 60), (False, 10_000), (False, 60)):
        got = packed_logprobs(model, batch, 0.7, budget, shared)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)
        found = gradients(model, *got)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            scale = float(gradient.abs().max()) or 1.0
            assert float((found[name] - gradient).abs().max()) <= 1e-5 * max(scale, 1.0), (name, shared, budget)


def test_prompt_is_computed_once_and_the_last_token_never() -> None:
    batch = samples()
    packs = make_packs(batch, range(len(batch)), budget_tokens=10_000, shared=True)
    inputs = int(np.maximum(batch.responses.lengths - 1, 0).sum())
    assert sum(pack.tokens.numel() for pack in packs) == int(batch.prompts.lengths.sum()) + inputs


def test_packs_do_not_depend_on_the_order_of_rows() -> None:
    batch = samples()
    rows = list(range(len(batch)))
    for shared in (True, False):
        one, two = (make_packs(batch, r, budget_tokens=60, shared=shared) for r in (rows, rows[::-1]))
        assert [p.rows for p in one] == [p.rows for p in two]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(one, two, strict=True))
        assert all(p.tokens.numel() <= 60 or len(p.rows) == 1 for p in one)


def test_critic_values_equal_those_of_single_samples(tmp_path: Path) -> None:
    model = load_critic(tiny_model("qwen2", tmp_path))
    torch.nn.init.normal_(score_head(model).weight)
    batch = samples()
    packs = make_packs(batch, range(len(batch)), budget_tokens=60, shared=True)
    got = torch.zeros(int(batch.responses.lengths.sum()))
    for pack in packs:
        got[pack.flat] = pack_values(model, pack).detach()
    model.set_attn_implementation("eager")
    at = 0
    for row, response in enumerate(batch.responses.rows()):
        prompt = batch.prompts.rows()[batch.prompt[row]]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))[None]
        hidden = model.base_model(tokens).last_hidden_state[0]
        expected = (hidden @ score_head(model).weight.T)[len(prompt) - 1 : len(prompt) - 1 + len(response), 0]
        torch.testing.assert_close(got[at : at + len(response)], expected, rtol=1e-5, atol=1e-5)
        at += len(response)


@pytest.mark.parametrize(
    ("kind", "options", "longest", "shared"),
    [
        ("llama", {}, 4000, True),
        ("mistral", {"sliding_window": 32}, 33, False),
        ("mistral", {"sliding_window": 32}, 32, True),
        ("gemma3_text", {"sliding_window": 16}, 17, False),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, 17, True),
        ("gemma2", {}, 10, False),  # soft-capped scores
        ("bloom", {}, 10, False),  # a bias by distance
        ("mamba", {}, 10, False),
    ],
)
def test_architecture_decides_who_shares(kind: str, options: dict[str, Any], longest: int, shared: bool) -> None:
    assert shares_prefix(transformers.AutoConfig.for_model(kind, **options), longest) is shared


@pytest.mark.parametrize("kind", ["bloom", "gemma2", "mistral-window"])
def test_other_architectures_are_right_in_padded_rows(kind: str, tmp_path: Path) -> None:
    small = dict(SMALL)
    if kind == "bloom":
        small = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    elif kind == "mistral-window":
        kind, small = "mistral", small | {"sliding_window": 8}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **small))
    save_model(model, tmp_path)
    model, batch = load_causal_lm(tmp_path), samples()
    assert not shares_prefix(model.config, 38)
    expected = naive_logprobs(model, batch, 1.0)
    got = packed_logprobs(model, batch, 1.0, 100, shared=False)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)


def test_a_head_of_another_form_is_refused(tmp_path: Path) -> None:
    model = load_causal_lm(tiny_model("granite", tmp_path))
    model.config.logits_scaling = 1.0  # what the head would be taken for
    own = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits / 3.0
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="its logits are not"):
        output_head(model)


def test_a_prompt_without_tokens_is_named() -> None:
    batch = SampleBatch.of_prompts([[5], []], samples_per_prompt=1, version=0, first_group=7)
    whole = SampleBatch(
        batch.prompts, batch.prompt, batch.group, batch.index, Ragged.from_rows([[3], [4]], np.int32),
        np.zeros(2, np.float32), np.ones(2, np.float32), batch.finish, batch.version,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"group 8, index 0.*no token"):
        make_packs(whole, [0, 1], budget_tokens=10, shared=True)
