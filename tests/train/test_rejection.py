"""What the correction rejects is in no denominator: the step is that of a batch in which those tokens never trained."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch

from functions.base.wire import Json, Version
from functions.models.pretrained import load_causal_lm
from functions.weights.store import fetch
from tests.support.train_call import ADAM, BASE, Bench, close

Array = npt.NDArray[np.float32]


def divergence(bench: Bench) -> list[Array]:
    """Of each sample, by token: k2 = (ln pi_train - ln pi_rollout)^2 / 2, from transformers alone."""
    model, batch, found = load_causal_lm(bench.directory), bench.samples, list[Array]()
    for row, response in enumerate(batch.responses.rows()):
        prompt = batch.prompts.rows()[batch.prompt[row]]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0, len(prompt) - 1 : -1], -1)
        part = slice(int(batch.responses.offsets[row]), int(batch.responses.offsets[row + 1]))
        ratio = log_p.gather(1, tokens[len(prompt) :, None])[:, 0].numpy() - batch.logprobs[part]
        found.append((ratio**2 / 2).astype(np.float32))
    return found


@pytest.mark.parametrize("statistic", ["token_k2", "seq_max_k2"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"aggregation": "seq-mean-token-mean", "entropy_coef": 0.05},
        {"aggregation": "seq-mean-token-sum", "kl": {"coef": 0.3}, "mini_batches": 2, "epochs": 2},
    ],
)
def test_the_step_of_a_batch_without_what_is_rejected(bench: Bench, statistic: str, params: Json) -> None:
    k2 = divergence(bench)
    each = k2 if statistic == "token_k2" else [np.full_like(x, x.max(initial=0.0)) for x in k2]
    values = np.unique(np.concatenate(each)[bench.samples.mask == 1])
    bound = float(values[len(values) // 2 - 1 : len(values) // 2 + 1].mean())  # about half of it goes
    masked = dataclasses.replace(bench.samples, mask=bench.samples.mask * (np.concatenate(each) <= bound))
    params = params | {"optimizer": ADAM | {"eps": 1e-3}, "micro_batch_tokens": 40}
    correction: Json = {"level": None, "reject": {statistic: bound}}

    rejected = bench.call(params | {"correction": correction}, id="rejected")
    never = bench.call(params, id="never", samples=[masked])
    close(bench.weights(rejected), bench.weights(never), 1e-6)
    share = 1 - masked.mask.sum() / bench.samples.mask.sum()
    assert 0.2 < share < 0.8
    if "mini_batches" not in params:
        metrics = rejected["metrics"]
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share, abs=1e-6)
        assert metrics["actor/pg_loss"] == pytest.approx(never["metrics"]["actor/pg_loss"], abs=1e-5)


def test_a_bound_that_nothing_passes_changes_nothing(bench: Bench) -> None:
    params: Json = {"optimizer": ADAM, "micro_batch_tokens": 40}
    free = bench.call(params | {"correction": {"level": "token"}}, id="free")
    bound = bench.call(params | {"correction": {"level": "token", "reject": {"token_k2": 1e4}}}, id="bound")
    assert bound["metrics"]["rollout_corr/rollout_rs_masked_fraction"] == 0
    close(bench.weights(free), bench.weights(bound), 1e-7)


def test_an_update_that_has_nothing_left_is_skipped(bench: Bench) -> None:
    everything: Json = {"optimizer": ADAM, "correction": {"level": None, "reject": {"token_k2": 1e-30}}}
    told = bench.call(everything)
    assert (told["metrics"]["actor/skipped_updates"], told["stats"]["optimizer_steps"]) == (1, 0)
    close(bench.weights(told), fetch(bench.exchange, BASE), 0)
    after = bench.call({"optimizer": ADAM}, id="after", version=Version.from_json(told["version"]))
    close(bench.weights(after), bench.weights(bench.call({"optimizer": ADAM}, id="alone")), 0)
