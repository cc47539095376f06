"""What other systems trained on without saying so (docs/reliability.md has the table): it cannot happen here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from functions.algorithms.advantages import grpo, reinforce_plus_plus
from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Version
from functions.call.function import FatalError
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import load_causal_lm
from functions.weights.base import import_model
from functions.weights.materialize import materialize
from tests.support.train_call import ADAM, Bench, make_samples, save_tiny

EOS = 2
STEP = {"optimizer": ADAM | {"weight_decay": 0.0}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """On a model whose padding token is its end of sequence, as Llama's and GPT-2's users set it."""
    save_tiny(tmp_path / "tiny", pad_token_id=EOS)
    exchange = DirectoryExchange(tmp_path / "exchange")
    import_model(exchange, "policy", tmp_path / "tiny")
    return Bench(exchange, tmp_path / "scratch", tmp_path / "tiny", *make_samples())


def pair(first: list[int], second: list[int], mask: list[float] | None = None) -> SampleBatch:
    """Two responses to the prompt [4, 5]."""
    base = SampleBatch.of_prompts([[4, 5]], samples_per_prompt=2, version=0)
    total = len(first) + len(second)
    return SampleBatch(
        base.prompts, base.prompt, base.group, base.index, Ragged.from_rows([first, second], np.int32),
        np.full(total, -3.9, np.float32), np.array(mask or [1.0] * total, np.float32),
        np.full(2, Finish.STOP, np.int32), base.version,
    )  # fmt: skip


def probability(directory: Path, token: int) -> float:
    """Of the token after the prompt [4, 5] and the response 7."""
    with torch.no_grad():
        return float(torch.softmax(load_causal_lm(directory)(torch.tensor([[4, 5, 7]])).logits[0, -1], -1)[token])


def test_the_end_of_sequence_is_trained_though_it_is_the_padding_token(bench: Bench, tmp_path: Path) -> None:
    """Megatron-Bridge#4660: labels equal to the padding token were masked, so that a model never learned to stop."""
    found = []
    for end in (1.0, 0.0):
        samples = pair([7, EOS], [7, 8], mask=[1, end, 1, 1])
        columns = Columns.of(samples, sample={"score": np.array([1.0, 0.0], np.float32)})
        data = bench.call(STEP, id=f"end-{end:.0f}", samples=[samples], columns=[columns])
        after = materialize(bench.exchange, Version.from_json(data["version"]), tmp_path / f"after-{end}")
        found.append(probability(after, EOS))
    trained, left_out = found
    assert trained > max(left_out, probability(bench.directory, EOS)) + 1e-3


def test_what_a_tool_said_is_not_trained(bench: Bench) -> None:
    """RAGEN#71: the mask was inverted, and the environment's tokens were trained instead of the model's.

    The masked tokens of both samples have log-probabilities and columns of their own: whatever they are, the step is
    the same to the bit.
    """
    samples = pair([7, 9, 8], [7, 10, EOS], mask=[1, 0, 1, 1, 0, 1])
    columns = Columns.of(samples, sample={"score": np.array([1.0, 0.0], np.float32)})
    one = bench.weights(bench.call(STEP, id="one", samples=[samples], columns=[columns]))
    samples.logprobs[[1, 4]] = -90.0
    two = bench.weights(bench.call(STEP, id="two", samples=[samples], columns=[columns]))
    assert all(torch.equal(one[name], two[name]) for name in one)
    unmasked = pair([7, 9, 8], [7, 10, EOS])
    three = bench.weights(bench.call(STEP, id="three", samples=[unmasked], columns=[columns]))
    assert any(not torch.equal(one[name], three[name]) for name in one)


def test_a_reward_after_a_tool_reaches_what_was_said_before_it() -> None:
    """verl#6376: the return was reset at a masked token; the action before a tool call lost its reward (gamma 0.5)."""
    estimate = reinforce_plus_plus(
        rewards=torch.tensor([0.0, 0.0, 1.0]),
        segment=torch.zeros(3, dtype=torch.int64),
        mask=torch.tensor([1.0, 0.0, 1.0]),
        gamma=0.5,
    )
    assert estimate.returns.tolist() == [0.5, 0.0, 1.0]


def test_a_group_is_the_samples_of_a_prompt_in_whatever_order_they_come() -> None:
    """rllm#776: each sample was a group of its own, so that the baseline was gone; grpo-flat#2: all were one group."""
    scores, group = torch.tensor([0.0, 1.0, 5.0, 7.0]), torch.tensor([0, 0, 1, 1])
    order = torch.tensor([2, 0, 3, 1])

    def advantages(scores: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        return grpo(scores=scores, group=group, segment=torch.arange(4), mask=torch.ones(4), epsilon=0.0).advantages

    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0]) / 2**0.5
    torch.testing.assert_close(advantages(scores, group), expected)
    torch.testing.assert_close(advantages(scores[order], group[order]), expected[order])


def test_tokens_are_trained_as_they_were_sampled(bench: Bench) -> None:
    """rllm#272, SkyRL#123: text was encoded again for training, into other tokens than the model had said.

    Training has no tokenizer to encode with: there is none in what it is given, and it trains.
    """
    assert not [path for path in bench.directory.iterdir() if "token" in path.name]
    assert not [key for key in bench.exchange.list("") if "tokenizer" in key]
    bench.call(STEP)


def test_samples_of_other_weights_are_refused(bench: Bench) -> None:
    """verl#7495, TRL#5312: the engine went on sampling with the weights it had begun with, and training went on.

    The samples' log-probabilities are those of the base; the version that is to be trained has gone on from it.
    """
    bound = STEP | {"max_rollout_logprob_diff": 0.05}
    samples = pair([7, EOS], [7, 8])
    columns = Columns.of(samples, sample={"score": np.array([1.0, 0.0], np.float32)})
    with torch.no_grad():
        model = load_causal_lm(bench.directory)
        for row, response in enumerate(samples.responses.rows()):
            logits = model(torch.tensor([[4, 5, *response.tolist()]])).logits[0, 1:-1]
            said = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0]
            samples.logprobs[2 * row : 2 * row + 2] = said.numpy()
    first = bench.call(bound, id="fresh", samples=[samples], columns=[columns])
    with pytest.raises(FatalError, match="stale weights"):
        bench.call(bound, id="stale", samples=[samples], columns=[columns], version=Version.from_json(first["version"]))
