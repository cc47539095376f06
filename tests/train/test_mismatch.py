"""Mismatch of each sample: of the samples that train, and together the metric that the batch has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from functions.base.samples import Columns, Ragged
from functions.base.wire import Json, Ref
from tests.support.train_call import ADAM, Bench


def of(bench: Bench, data: Json) -> dict[tuple[int, int], float]:
    found = Columns.decode(bench.exchange.get(Ref.from_json(data["mismatch"])))
    return dict(zip(found.keys, found.sample["mismatch"].tolist(), strict=True))


def tokens_of(bench: Bench, data: Json) -> dict[tuple[int, int], list[float]]:
    found = Columns.decode(bench.exchange.get(Ref.from_json(data["mismatch"])))
    rows = Ragged(found.token["difference"], found.lengths).rows()
    return dict(zip(found.keys, map(np.ndarray.tolist, rows), strict=True))


@pytest.mark.parametrize("epochs", [1, 2], ids=["in the one pass", "by a pass of its own"])
def test_against_a_forward_pass_of_each_sample(bench: Bench, epochs: int) -> None:
    data = bench.call({"model": "policy", "optimizer": ADAM, "epochs": epochs, "micro_batch_tokens": 60})
    found, samples = of(bench, data), bench.samples
    model = AutoModelForCausalLM.from_pretrained(bench.directory, dtype=torch.float32).eval()
    expected, tokens, each = {}, {}, {}
    starts = samples.responses.offsets
    for row in range(len(samples)):
        prompt, response = samples.prompts[int(samples.prompt[row])], samples.responses[row]
        mask = samples.mask[starts[row] : starts[row + 1]]
        if not mask.any():
            continue
        ids = torch.tensor([*prompt.tolist(), *response.tolist()])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        own = logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        rollout = samples.logprobs[starts[row] : starts[row + 1]]
        key = (int(samples.group[row]), int(samples.index[row]))
        expected[key] = float(np.abs(own - rollout)[mask == 1].mean())
        tokens[key] = float(mask.sum())
        each[key] = np.where(mask == 1, own - rollout, np.nan).tolist()
    assert list(found) == sorted(expected)
    assert found == pytest.approx(expected, abs=2e-5)
    told = tokens_of(bench, data)
    assert list(told) == sorted(each)
    for key, values in each.items():
        assert told[key] == pytest.approx(values, abs=2e-5, nan_ok=True)
    mean = sum(found[key] * tokens[key] for key in found) / sum(tokens.values())
    assert mean == pytest.approx(data["metrics"]["rollout_corr/abs_diff_mean"], rel=1e-5)


def test_a_sample_that_does_not_train_has_none(bench: Bench) -> None:
    data = bench.call({"model": "policy", "optimizer": ADAM, "dropped": [[0, 1]], "filter_groups": True})
    found = of(bench, data)
    assert (0, 1) not in found
    assert not {group for group, _ in found} & {1}, "the group without signal is filtered out"
    assert (0, 0) in found
