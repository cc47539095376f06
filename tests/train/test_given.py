"""Before RL: a step of sft, dpo and bradley_terry against TRL's losses written out in torch (TRL 1.16:
trl/trainer/sft_trainer.py compute_loss, trl/trainer/dpo_trainer.py _compute_loss with loss sigmoid and reverse KL,
trl/trainer/reward_trainer.py compute_loss), padded and without any of this project's formulas."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import Json, Version
from functions.call.function import FatalError
from functions.models.pretrained import load_causal_lm, load_critic, save_model, score_head
from functions.weights.base import import_model
from tests.support.train_call import Bench, close

LR = 0.1
OPTIMIZER: Json = {"lr": LR, "eps": 1.0, "max_grad_norm": None}


def padded(batch: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
    """(input_ids, attention_mask, completion_mask) [S, T], padded on the right, as TRL's collators make them."""
    lengths = batch.prompts.lengths[batch.prompt] + batch.responses.lengths
    tokens, attention, completion = (torch.zeros(len(batch), int(lengths.max()), dtype=torch.long) for _ in range(3))
    for row, response in enumerate(batch.responses.rows()):
        prompt = batch.prompts.rows()[batch.prompt[row]]
        whole = np.concatenate((prompt, response))
        tokens[row, : len(whole)] = torch.from_numpy(whole.astype(np.int64))
        attention[row, : len(whole)] = 1
        completion[row, len(prompt) : len(whole)] = 1
    return tokens, attention, completion


def logps(model: nn.Module, batch: SampleBatch) -> Tensor:
    """[S, T - 1] per token, 0 outside of the completion."""
    tokens, attention, completion = padded(batch)
    log_p = torch.log_softmax(model(input_ids=tokens, attention_mask=attention).logits[:, :-1], -1)
    return log_p.gather(-1, tokens[:, 1:, None])[..., 0] * completion[:, 1:]


def after(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The weights after AdamW's first step."""
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: (p - LR * p.grad / (p.grad.abs() + 1.0)).detach() for name, p in model.named_parameters()}  # type: ignore[operator,union-attr]


@pytest.fixture
def pairs(bench: Bench) -> Bench:
    """Two samples of each prompt, all of whose tokens train; a reference of its own."""
    rows = [row for row in range(len(bench.samples)) if bench.samples.index[row] in (0, 2)]
    batch = bench.samples.select(rows)
    batch = replace(
        batch, index=batch.index // 2, mask=np.ones_like(batch.mask), logprobs=np.zeros_like(batch.logprobs)
    )
    reference = np.random.default_rng(3).normal(-2, 0.5, len(batch.mask)).astype(np.float32)
    return replace(bench, samples=batch, columns=Columns.of(batch, token={"ref_logprobs": reference}))


@pytest.mark.parametrize("budget", [10_000, 20])
def test_sft_is_trls_step(pairs: Bench, budget: int) -> None:
    model = load_causal_lm(pairs.directory)
    values = logps(model, pairs.samples)
    expected = after(model, -values.sum() / float(pairs.samples.mask.sum()))
    params: Json = {"optimizer": OPTIMIZER, "advantage": "sft", "loss": "gpg", "micro_batch_tokens": budget}
    data = pairs.call(params)
    close(pairs.weights(data), expected, 1e-6)  # gradients to 1e-5
    mean = -float(values.detach().sum()) / float(pairs.samples.mask.sum())
    assert data["metrics"]["sft/loss"] == pytest.approx(mean, rel=1e-5)
    without = ("rollout_corr/", "critic/", "actor/p", "actor/ratio")  # of a policy that samples, and is scored
    assert not [name for name in data["metrics"] if name.startswith(without)]


DPO: Json = {
    "optimizer": OPTIMIZER, "advantage": "dpo", "loss": "gpg", "aggregation": "seq-mean-token-sum",
    "advantage_options": {"beta": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("budget", [10_000, 15])
def test_dpo_is_trls_step(pairs: Bench, budget: int) -> None:
    model = load_causal_lm(pairs.directory)
    batch = pairs.samples
    reference = torch.tensor([values.sum() for values in np.split(
        pairs.columns.token["ref_logprobs"], np.cumsum(batch.responses.lengths)[:-1])])  # fmt: skip
    ratios = logps(model, batch).sum(1) - reference
    loss = -nn.functional.logsigmoid(0.3 * (ratios[0::2] - ratios[1::2])).mean()
    expected = after(model, loss)
    data = pairs.call(DPO | {"micro_batch_tokens": budget})
    close(pairs.weights(data), expected, 1e-6)
    assert data["metrics"]["dpo/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert (data["stats"]["packs"] > 4) == (budget == 15), "pairs lie in different packs"


@pytest.mark.parametrize("budget", [10_000, 15])
def test_a_reward_model_is_trls_step(pairs: Bench, tmp_path: Path, budget: int) -> None:
    directory = tmp_path / "critic"
    model = load_critic(pairs.directory)
    torch.manual_seed(5)
    nn.init.normal_(score_head(model).weight)
    save_model(model, directory)
    for file in pairs.directory.glob("*token*"):
        shutil.copy(file, directory)
    import_model(pairs.exchange, "critic", directory)
    tokens, attention, _ = padded(pairs.samples)
    states = model.base_model(input_ids=tokens, attention_mask=attention).last_hidden_state
    scores = score_head(model)(states)[torch.arange(len(tokens)), attention.sum(1) - 1, 0]
    loss = -nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()
    expected = after(model, loss)
    rows = [[*row.tolist(), int(row[-1])] for row in pairs.samples.responses.rows()]
    ends = replace(
        pairs.samples, responses=type(pairs.samples.responses).from_rows(rows, np.int32),
        mask=np.concatenate([[0.0] * (len(row) - 1) + [1.0] for row in rows]).astype(np.float32),
        logprobs=np.zeros(sum(map(len, rows)), np.float32),
    )  # fmt: skip
    own = replace(pairs, samples=ends, columns=Columns.of(ends))
    params: Json = {"model": "critic", "objective": "value", "optimizer": OPTIMIZER, "advantage": "bradley_terry",
                    "aggregation": "seq-mean-token-sum", "micro_batch_tokens": budget}  # fmt: skip
    data = own.call(params, version=Version("critic", 0))
    close(own.weights(data), expected, 1e-6)
    assert data["metrics"]["rm/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert data["metrics"]["rm/margin"] == pytest.approx(float((scores[0::2] - scores[1::2]).detach().mean()), rel=1e-4)


def test_pairs_that_are_none_are_refused(pairs: Bench) -> None:
    three = pairs.samples.select(range(7))
    token = {"ref_logprobs": np.zeros(int(three.responses.lengths.sum()), np.float32)}
    with pytest.raises(FatalError, match="has 1 samples, a pair has 2: chosen, rejected"):
        pairs.call(DPO, samples=[three], columns=[Columns.of(three, token=token)])
    with pytest.raises(FatalError, match="advantage 'dpo' wants 1: its step is its batch"):
        pairs.call(DPO | {"mini_batches": 2})


def test_sft_trains_adapters_in_bfloat16(pairs: Bench) -> None:
    params: Json = {"optimizer": {"lr": 1e-2}, "advantage": "sft", "loss": "gpg", "lora": {"rank": 2}}
    losses, version = [], Version("policy", 0)
    for number in range(3):
        data = pairs.call(params | {"dtype": "bfloat16"}, id=f"s{number}", version=version)
        losses.append(data["metrics"]["sft/loss"])
        version = Version.from_json(data["version"])
    assert losses[2] < losses[0]
