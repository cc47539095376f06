"""Stops, min-p, penalties, banned words: against transformers' logits, in both engines; and the trainer's side."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.call.function import FatalError
from functions.exchange.directory import DirectoryExchange
from functions.generate.engine.base import Engine, Request, Sampling
from functions.generate.torch.engine import TorchEngine
from functions.generate.torch.transformers_engine import TransformersEngine
from functions.models.pretrained import load_causal_lm
from functions.weights.base import import_model
from tests.support.tiny_job import make_model
from tests.support.train_call import BASE, Bench

ENGINES = {"torch": TorchEngine, "transformers": TransformersEngine}
ALL = Sampling(12, 0.8, 0.95, 9, 3, min_p=0.05, repetition_penalty=1.5, banned=((7,), (5, 6)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def engine_of(name: str, directory: Path, *, deterministic: bool = False) -> Engine:
    made: Engine = ENGINES[name](dtype=torch.float32, device=torch.device("cpu"), slots=8, deterministic=deterministic)
    made.load(BASE, directory)
    return made


def requests(count: int = 6) -> list[Request]:
    prompts = [np.array(tokens, np.int32) for tokens in ([3, 4, 5], [6, 7, 8, 9])]
    empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return [Request(i, i % 2, i // 2, prompts[i % 2], *empty) for i in range(count)]


def reference(logits: Tensor, before: list[int], response: list[int], sampling: Sampling) -> Tensor:
    """ln of the distribution, written out for one token."""
    z = logits.clone()
    for token in set(before):
        z[token] = z[token] / sampling.repetition_penalty if z[token] > 0 else z[token] * sampling.repetition_penalty
    for sequence in sampling.banned:
        if response[len(response) - len(sequence) + 1 :] == list(sequence[:-1]):
            z[sequence[-1]] = -torch.inf
    p = (z / sampling.temperature).softmax(-1)
    p = torch.where(p >= sampling.min_p * p.max(), p, 0.0)
    order = p.argsort(descending=True)[: sampling.top_k or None]
    kept, mass, total = torch.zeros_like(p), 0.0, float(p[order].sum())
    for token in order.tolist():
        if mass / total < sampling.top_p:
            kept[token] = p[token]
        mass += float(p[token])
    return (kept / kept.sum()).log()


@pytest.mark.parametrize("name", ENGINES)
def test_log_probabilities_are_of_the_distribution_that_was_sampled_from(name: str, directory: Path) -> None:
    model = load_causal_lm(directory)
    samples = list(engine_of(name, directory).generate(requests(), ALL, lambda: False))
    assert len(samples) == 6
    for sample in samples:
        prompt, response = requests()[sample.number].prompt.tolist(), sample.response.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        for at, token in enumerate(response):
            expected = reference(logits[at], prompt + response[:at], response[:at], ALL)[token]
            assert sample.logprobs[at] == pytest.approx(float(expected), abs=2e-4)
        assert 7 not in response
        assert (5, 6) not in pairwise(response)


def test_a_cut_sample_goes_on_as_if_it_had_not_been_cut(directory: Path) -> None:
    whole = {s.number: s for s in engine_of("torch", directory, deterministic=True).generate(requests(), ALL, bool)}
    engine, steps = engine_of("torch", directory, deterministic=True), iter([False] * 5)
    part = list(engine.generate(requests(), ALL, lambda: next(steps, True)))
    assert any(s.finish == Finish.UNFINISHED and len(s.response) for s in part)
    again = [replace(requests()[s.number], response=s.response, logprobs=s.logprobs)
             for s in part if s.finish == Finish.UNFINISHED]  # fmt: skip
    for sample in [s for s in part if s.finish != Finish.UNFINISHED] + list(engine.generate(again, ALL, bool)):
        assert sample.response.tolist() == whole[sample.number].response.tolist()
        assert sample.logprobs.tobytes() == whole[sample.number].logprobs.tobytes()


@pytest.mark.parametrize("name", ENGINES)
def test_a_response_ends_with_its_stop(name: str, directory: Path) -> None:
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(directory / "tokenizer.json")).decode
    free = Sampling(12, seed=1)
    samples = {s.number: s.response.tolist() for s in engine_of(name, directory).generate(requests(), free, bool)}
    string = decode(samples[0][2:4], skip_special_tokens=False)
    for how in (Sampling(12, seed=1, stop=(string,)), Sampling(12, seed=1, stop_token_ids=(samples[0][3],))):
        for sample in engine_of(name, directory).generate(requests(), how, bool):
            full, got = samples[sample.number], sample.response.tolist()
            assert got == full[: len(got)]
            ends = [n for n in range(1, len(full) + 1) if string in decode(full[:n], skip_special_tokens=False)]
            if how.stop_token_ids:
                ends = [n + 1 for n, token in enumerate(full) if token == samples[0][3]]
            assert len(got) == (ends[0] if ends else len(full))
            assert sample.finish == (Finish.STOP if ends or full[-1] == 0 else Finish.LENGTH)


def test_the_trainer_compares_like_with_like(directory: Path, tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    import_model(exchange, "policy", directory)
    made = list(engine_of("torch", directory).generate(requests(), ALL, bool))
    begun = SampleBatch.of_prompts([[3, 4, 5], [6, 7, 8, 9]], samples_per_prompt=3, version=0)
    rows = sorted(made, key=lambda s: (s.number % 2, s.number // 2))
    batch = replace(
        begun, responses=Ragged.from_rows([s.response for s in rows], np.int32),
        logprobs=np.concatenate([s.logprobs for s in rows]),
        mask=np.ones(sum(len(s.response) for s in rows), np.float32),
        finish=np.array([s.finish for s in rows], np.int32),
    )  # fmt: skip
    scores = np.arange(6, dtype=np.float32)
    bench = Bench(exchange, tmp_path / "scratch", directory, batch, Columns.of(batch, sample={"score": scores}))
    same = {"temperature": 0.8, "top_p": 0.95, "top_k": 9, "min_p": 0.05, "repetition_penalty": 1.5,
            "banned": [[7], [5, 6]], "max_rollout_logprob_diff": None}  # fmt: skip
    for more in ({}, {"epochs": 2}):
        metrics = bench.call(same | more, id=f"call{len(more)}")["metrics"]
        assert metrics["rollout_corr/abs_diff_max"] < 1e-3
    with pytest.raises(FatalError, match="rollout log-probabilities differ"):
        bench.call(same | {"repetition_penalty": 1.0})
