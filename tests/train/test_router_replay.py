"""Routing replay: what the rollout's routers chose, training's routers take, with weights of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from functions.base.samples import Finish, Ragged, SampleBatch, unrouted
from functions.base.wire import Version, WireError
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.torch.transformers_engine import TransformersEngine
from functions.models.forward import output_head, pack_logprobs
from functions.models.packing import make_packs
from functions.models.pretrained import load_causal_lm
from functions.models.router_replay import routers
from tests.support.architectures import VOCABULARY, tiny_model

LAYERS, EXPERTS, K, DENSE = 3, 8, 2, 1
SAMPLING = Sampling(20, seed=3, routed_experts=True, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        "qwen3_moe", tmp_path_factory.mktemp("moe"), num_hidden_layers=LAYERS, num_experts=EXPERTS,
        num_experts_per_tok=K, mlp_only_layers=[DENSE], norm_topk_prob=True,
    )  # fmt: skip


def engine_of(directory: Path) -> TransformersEngine:
    engine = TransformersEngine(dtype=torch.float32, device=torch.device("cpu"), slots=64, deterministic=False)
    engine.load(Version("policy", 0), directory)
    return engine


def requests() -> list[Request]:
    """Three ragged prompts, four samples of each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in (7, 1, 4)]
    none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return [Request(4 * g + i, g, i, prompt, *none) for g, prompt in enumerate(prompts) for i in range(4)]


def batch_of(asked: list[Request], samples: list[Sample]) -> SampleBatch:
    """One sample is cut short: they are ragged."""
    samples = sorted(samples, key=lambda sample: sample.number)
    base = SampleBatch.of_prompts([asked[4 * g].prompt.tolist() for g in range(3)], samples_per_prompt=4, version=0)
    lengths = np.array([len(s.response) - 3 * s.number % 11 for s in samples], np.int32)

    def flat(name: str) -> Any:
        return np.concatenate([getattr(s, name)[:n] for s, n in zip(samples, lengths, strict=True)])

    return replace(
        base, responses=Ragged(flat("response"), lengths), logprobs=flat("logprobs"), experts=flat("experts"),
        mask=np.ones(lengths.sum(), np.float32), finish=np.full(12, Finish.STOP, np.int32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def batch(model_dir: Path) -> SampleBatch:
    asked = requests()
    return batch_of(asked, list(engine_of(model_dir).generate(asked, SAMPLING, lambda: False)))


def perturbed(directory: Path) -> Any:
    """The model with other routers."""
    model = load_causal_lm(directory)
    torch.manual_seed(1)
    with torch.no_grad():
        for _, router in routers(model).values():
            router.weight.add_(torch.randn_like(router.weight) * router.weight.std())
    return model


def logprobs(
    model: Any, batch: SampleBatch, *, shared: bool = True, replay: bool = True, budget_tokens: int = 70
) -> Tensor:
    found = torch.zeros(len(batch.logprobs))
    head = output_head(model)
    for pack in make_packs(batch, range(len(batch)), budget_tokens=budget_tokens, shared=shared, replay=replay):
        found = found.index_put((pack.flat,), pack_logprobs(model, head, pack, 1.0)[0])
    return found


def by_hand(model: Any, batch: SampleBatch) -> Tensor:
    """Sample by sample through the whole model, its experts in a loop over tokens: the rollout's of a response's
    tokens, of the prompt's the most probable ones."""
    model.set_attn_implementation("eager")
    found = []
    for row, response in enumerate(batch.responses.rows()):
        prompt = batch.prompts[int(batch.prompt[row])]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        assert batch.experts is not None
        given = Ragged(batch.experts, batch.responses.lengths)[row].astype(np.int64)
        for number, (layer, _) in routers(model).items():
            mlp: Any = layer.mlp
            mlp.forward = block(mlp, given[:, number], len(prompt))
        logits = model(tokens[None, :-1]).logits[0, len(prompt) - 1 :].float()
        found.append(torch.log_softmax(logits, -1).gather(1, tokens[len(prompt) :, None])[:, 0])
    return torch.cat(found)


def block(mlp: Any, given: Any, prompt: int) -> Any:
    def forward(states: Tensor) -> Tensor:
        out = []
        for place, x in enumerate(states[0]):
            probabilities = torch.softmax(mlp.gate.weight @ x, 0)
            own = probabilities.topk(K).indices.tolist()
            chosen = own if place < prompt - 1 else given[place - prompt + 1].tolist()
            total = sum(probabilities[e] for e in chosen)
            y = torch.zeros_like(x)
            for e in chosen:
                gate, up = (mlp.experts.gate_up_proj[e] @ x).chunk(2)
                y = y + probabilities[e] / total * (mlp.experts.down_proj[e] @ (mlp.experts.act_fn(gate) * up))
            out.append(y)
        return torch.stack(out)[None]

    return forward


def test_the_same_weights_give_the_engines_logprobs(model_dir: Path, batch: SampleBatch) -> None:
    model = load_causal_lm(model_dir)
    assert batch.experts is not None
    assert batch.experts.dtype == np.uint8
    assert batch.experts.shape[1:] == (LAYERS, K)
    assert (batch.experts[:, DENSE] == 255).all()
    assert (batch.experts[:, [0, 2]] < EXPERTS).all()
    for shared in (True, False):
        got = logprobs(model, batch, shared=shared).detach()
        torch.testing.assert_close(got, torch.from_numpy(batch.logprobs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_routers_take_the_rollouts_experts(model_dir: Path, batch: SampleBatch, checkpointing: bool) -> None:
    """Values and gradients, the routers' too, are those of a loop over experts by hand."""
    model, reference = perturbed(model_dir), perturbed(model_dir)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    own = logprobs(model, batch, replay=False).detach()
    expected = by_hand(reference, batch)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert float((own - expected.detach()).abs().max()) > 0.1, "its own routers choose others"
    for shared in (True, False):
        model.zero_grad()
        got = logprobs(model, batch, shared=shared)
        torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-5)
        (got * weights).sum().backward()  # type: ignore[no-untyped-call]
        wanted = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            scale = max(1.0, float(wanted[name].grad.abs().max()))
            assert float((parameter.grad - wanted[name].grad).abs().max()) < 1e-5 * scale, name
    assert torch.equal(logprobs(model, batch, replay=False).detach(), own), "a pass without is as before"


def test_packs_change_no_value(model_dir: Path, batch: SampleBatch) -> None:
    """Also where the samples of a prompt do not agree on the experts of its last token."""
    assert batch.experts is not None
    model, experts = load_causal_lm(model_dir), np.random.default_rng(0).permuted(batch.experts, axis=0)
    mixed = replace(batch, experts=np.where(experts == 255, batch.experts, experts))
    wanted = logprobs(model, mixed, budget_tokens=10_000)
    for shared, budget in ((True, 30), (False, 10_000)):
        found = logprobs(model, mixed, budget_tokens=budget, shared=shared)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_what_nobody_says_the_own_routers_choose(model_dir: Path, batch: SampleBatch) -> None:
    assert batch.experts is not None
    silent = replace(batch, experts=unrouted(batch.experts, len(batch.experts)))
    model = perturbed(model_dir)
    torch.testing.assert_close(logprobs(model, silent), logprobs(model, silent, replay=False), rtol=0, atol=1e-6)


def test_a_cut_sample_keeps_what_was_chosen(model_dir: Path) -> None:
    """It goes on in another engine, with and without its keys and values, with the experts of both."""
    asked = requests()
    whole = {s.number: s for s in engine_of(model_dir).generate(asked, SAMPLING, lambda: False)}
    looks = iter(range(100))
    cut = list(engine_of(model_dir).generate(asked, SAMPLING, lambda: next(looks) > 6))
    assert {s.finish for s in cut} == {Finish.UNFINISHED}
    marked = [replace(s, experts=np.full_like(s.experts, 7)) for s in cut]
    for cache in (True, False):
        again = [
            replace(asked[s.number], response=s.response, logprobs=s.logprobs, experts=s.experts,
                    cache=s.cache if cache else None)
            for s in marked
        ]  # fmt: skip
        for sample in engine_of(model_dir).generate(again, SAMPLING, lambda: False):
            begun, wanted = len(cut[sample.number].response), whole[sample.number]
            assert 0 < begun < len(wanted.response)
            assert sample.response.tolist() == wanted.response.tolist()
            assert wanted.experts is not None
            assert sample.experts is not None
            assert (sample.experts[:begun] == 7).all()
            assert (sample.experts[begun:] == wanted.experts[begun:]).all()


def test_experts_go_with_their_tokens(batch: SampleBatch) -> None:
    """Through the exchange, in any order; samples without a token have none, and those with tokens do not lack them."""
    again = SampleBatch.decode(batch.encode())
    parts = SampleBatch.concat([again.select([5, 2, 9]), again.select([i for i in range(12) if i not in (5, 2, 9)])])
    assert batch.experts is not None
    order = parts.in_order().experts
    assert order is not None
    np.testing.assert_array_equal(order, batch.experts)
    fresh = SampleBatch.of_prompts([[3]], samples_per_prompt=2, version=0, first_group=9)
    again = SampleBatch.concat([fresh, batch])
    assert again.experts is not None
    np.testing.assert_array_equal(again.experts, batch.experts)
    plain = replace(batch, experts=None)
    assert SampleBatch.decode(plain.encode()).experts is None
    assert b"experts" not in plain.encode()
    with pytest.raises(WireError, match="experts has"):
        SampleBatch.concat([plain, replace(batch, group=batch.group + 5)])


def test_a_model_without_known_routers_is_refused(tmp_path: Path, batch: SampleBatch) -> None:
    model = load_causal_lm(tiny_model("qwen3", tmp_path))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no routers that are known here"):
        logprobs(model, batch)
