"""Every architecture, engine and mode against transformers' own forward pass in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.base import Engine, Request, Sample, Sampling
from functions.generate.torch.engine import TorchEngine
from functions.generate.torch.transformers_engine import TransformersEngine

ModelDir = Callable[[str], Path]
Requests = Callable[..., list[Request]]
LLAMA_SHAPED = (
    "llama", "llama-tied-rope3", "llama-linear-rope", "qwen2", "qwen2-window", "qwen3", "mistral", "gemma3",
    "gemma3-sliding", "gemma3-full",
)  # fmt: skip
CASES = [(TorchEngine, name, deterministic) for name in LLAMA_SHAPED for deterministic in (False, True)] + [
    (TransformersEngine, name, deterministic)
    for name, deterministic in [("gpt2", False), ("gpt2", True), ("gemma3", False), ("mistral", False)]
]


def build(kind: Any, directory: Path, *, slots: int = 10, deterministic: bool = False) -> Engine:
    engine: Engine = kind(dtype=torch.float32, device=torch.device("cpu"), slots=slots, deterministic=deterministic)
    engine.load(Version("policy", 4), directory)
    return engine


@cache
def reference(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def check(
    directory: Path, requests: Sequence[Request], samples: Sequence[Sample], sampling: Sampling, eos: int = 2
) -> None:
    """Each request has one sample; log-probabilities are the model's; greedy tokens are its argmax; ends are right."""
    assert sorted(s.number for s in samples) == sorted(r.number for r in requests)
    model = reference(directory)
    by_number = {r.number: r for r in requests}
    for sample in samples:
        prompt = by_number[sample.number].prompt
        assert sample.version == 4
        with torch.no_grad():
            ids = torch.from_numpy(np.concatenate((prompt, sample.response)).astype(np.int64))
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        response = ids[len(prompt) :]
        if sampling.temperature == 0:
            assert logits.argmax(-1).tolist() == response.tolist()
        wanted = (logits / (sampling.temperature or 1.0)).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), wanted, atol=1e-5, rtol=0)
        stopped = not sampling.ignore_eos and response[-1] == eos
        assert sample.finish == (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(response) == sampling.max_response_length
        assert sampling.ignore_eos or eos not in response[:-1].tolist()


@pytest.mark.parametrize(("kind", "name", "deterministic"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_logprobs(
    kind: Any, name: str, deterministic: bool, temperature: float, model_dir: ModelDir, requests_for: Requests
) -> None:
    # 5 prompts of 2..30 tokens, 4 samples each, 10 slots: ragged prompts, refilled slots, windows of 8 left behind.
    requests, sampling = requests_for(5, 4), Sampling(20, temperature, seed=3)
    engine = build(kind, model_dir(name), deterministic=deterministic)
    samples = list(engine.generate(requests, sampling, lambda: False))
    check(model_dir(name), requests, samples, sampling)
    if temperature:
        assert len({s.response.tobytes() for s in samples}) > 15  # samples of a prompt have streams of their own


@pytest.mark.parametrize("kind", [TorchEngine, TransformersEngine])
def test_goes_on_with_a_partial_response(kind: Any, model_dir: ModelDir, requests_for: Requests) -> None:
    requests, sampling = requests_for(4, 3), Sampling(20, seed=9)
    engine = build(kind, model_dir("qwen3"))
    whole = {s.number: s for s in engine.generate(requests, sampling, lambda: False)}
    begun = [
        replace(r, response=s.response[:n], logprobs=s.logprobs[:n])
        for r in requests
        for s in [whole[r.number]]
        for n in [(5 * r.number) % len(s.response)]
    ]
    samples = list(engine.generate(begun, sampling, lambda: False))
    check(model_dir("qwen3"), requests, samples, sampling)
    for sample in samples:  # the same streams: the same tokens, up to a draw that rounding decides
        assert sample.response.tolist() == whole[sample.number].response.tolist()


def test_engines_draw_the_same_tokens(model_dir: ModelDir, requests_for: Requests) -> None:
    requests, sampling = requests_for(3, 4), Sampling(16, 1.1, top_p=0.9, top_k=40, seed=2)
    found = [
        {
            s.number: s.response.tolist()
            for s in build(kind, model_dir("llama")).generate(requests, sampling, lambda: False)
        }
        for kind in (TorchEngine, TransformersEngine)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("slots", "samples"), [(1, 3), (3, 10), (64, 2)])
def test_any_number_of_slots(
    slots: int, samples: int, deterministic: bool, model_dir: ModelDir, requests_for: Requests
) -> None:
    requests, sampling = requests_for(3, samples), Sampling(12, seed=1)
    engine = build(TorchEngine, model_dir("llama"), slots=slots, deterministic=deterministic)
    check(model_dir("llama"), requests, list(engine.generate(requests, sampling, lambda: False)), sampling)


def test_a_prompt_is_computed_once(model_dir: ModelDir, requests_for: Requests) -> None:
    requests = requests_for(6, 5)
    engine = build(TorchEngine, model_dir("llama"), slots=10)
    samples = list(engine.generate(requests, Sampling(10, ignore_eos=True), lambda: False))
    prompts = sum(len(r.prompt) for r in requests) // 5
    assert engine.stats.prefill_tokens == prompts
    assert engine.stats.shared_tokens == 4 * prompts
    assert engine.stats.decode_tokens == sum(len(s.response) - 1 for s in samples)


def behind(head: int, requests: Sequence[Request]) -> list[Request]:
    """The requests behind a common head of that many tokens."""
    tokens = (3 + np.arange(head) % 40).astype(np.int32)
    return [replace(r, prompt=np.concatenate((tokens, r.prompt))) for r in requests]


@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_a_head_that_all_prompts_share_is_computed_once(name: str, model_dir: ModelDir, requests_for: Requests) -> None:
    requests, sampling = behind(24, requests_for(5, 4)), Sampling(20, seed=3)
    engine = build(TorchEngine, model_dir(name))  # 10 slots: later prompts are admitted while others decode
    samples = list(engine.generate(requests, sampling, lambda: False))
    check(model_dir(name), requests, samples, sampling)
    own = sum(len(r.prompt) - 24 for r in requests) // 4
    assert engine.stats.prefill_tokens <= 24 + own  # less where the first own tokens are alike too
    assert engine.stats.prefill_tokens + engine.stats.shared_tokens == sum(len(r.prompt) for r in requests)


def test_a_head_is_no_reason_to_depend_on_others_in_deterministic_mode(
    model_dir: ModelDir, requests_for: Requests
) -> None:
    requests, sampling = behind(24, requests_for(3, 2)), Sampling(8, seed=1)
    engine = build(TorchEngine, model_dir("llama"), deterministic=True)
    together = {s.number: s for s in engine.generate(requests, sampling, lambda: False)}
    for request in requests:
        [alone] = engine.generate([request], sampling, lambda: False)
        assert alone.logprobs.tobytes() == together[request.number].logprobs.tobytes()


def test_bfloat16_stays_near_float32(model_dir: ModelDir, requests_for: Requests) -> None:
    engine = TorchEngine(dtype=torch.bfloat16, device=torch.device("cpu"), slots=20, deterministic=False)
    engine.load(Version("policy", 0), model_dir("qwen3"))
    model = AutoModelForCausalLM.from_pretrained(model_dir("qwen3"), dtype=torch.bfloat16).float().eval()
    requests = {r.number: r for r in requests_for(4, 3)}
    for sample in engine.generate(list(requests.values()), Sampling(16, seed=1), lambda: False):
        prompt = requests[sample.number].prompt
        ids = torch.from_numpy(np.concatenate((prompt, sample.response)).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), wanted, atol=0.15, rtol=0)


@pytest.mark.parametrize("kind", [TorchEngine, TransformersEngine])
def test_refuses_what_does_not_fit(kind: Any, model_dir: ModelDir, requests_for: Requests) -> None:
    engine = build(kind, model_dir("llama"))
    request = replace(requests_for(1, 1)[0], prompt=np.ones(100, np.int32))
    with pytest.raises(ValueError, match=r"group 0, index 0.*100 tokens plus max_response_length 29 exceeds.*128"):
        list(engine.generate([request], Sampling(29), lambda: False))
    with pytest.raises(ValueError, match="empty prompt"):
        list(engine.generate([replace(request, prompt=np.zeros(0, np.int32))], Sampling(29), lambda: False))
    with pytest.raises(ValueError, match=r"prompt has token 97, the model's vocabulary has 97"):
        list(engine.generate([replace(request, prompt=np.array([5, 97], np.int32))], Sampling(29), lambda: False))


def test_load_names_a_tensor_that_is_missing_or_unknown(model_dir: ModelDir, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    tensors = load_file(model_dir("llama") / "model.safetensors")
    shutil.copy(model_dir("llama") / "config.json", tmp_path)
    engine = TorchEngine(dtype=torch.float32, device=torch.device("cpu"), slots=4, deterministic=False)
    lacking = {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        engine.load(Version("policy", 0), tmp_path)
    save_file(tensors | {"model.layers.0.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.extra\.weight.*no place"):
        engine.load(Version("policy", 0), tmp_path)
