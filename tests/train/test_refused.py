"""What the train function refuses: one line that names it, and nothing published."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from functions.base.samples import Columns, Ragged, SampleBatch
from functions.base.wire import Json, Version
from functions.call.function import FatalError
from functions.exchange.base import NotFound
from functions.weights.manifest import read_manifest
from functions.weights.store import fetch
from tests.support.train_call import ADAM, BASE, GROUPS, Bench, N


def rejects(bench: Bench, message: str, params: Json | None = None, **kwargs: Any) -> None:
    with pytest.raises(FatalError, match=message) as caught:
        bench.call({"optimizer": ADAM} if params is None else params, **kwargs)
    assert "\n" not in str(caught.value)
    with pytest.raises(NotFound):
        read_manifest(bench.exchange, Version("policy", 1, "3a1b"))
    assert not bench.exchange.list("weights/policy/v000001")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"optimiser": {}}, "unknown key 'optimiser'; did you mean 'optimizer'"),
        ({"optimizer": {"learning_rate": 1}}, r"params\.optimizer: unknown key 'learning_rate'"),
        ({"optimizer": {"lr": "1e-6"}}, r"params\.optimizer\.lr: got '1e-6', wants float"),
        ({"optimizer": {"schedule": "step"}}, "wants one of 'constant', 'linear', 'cosine'"),
        ({"optimizer": {"schedule": "linear"}}, "wants total_steps"),
        ({"advantage": "gro"}, "advantage: got 'gro', wants one of"),
        ({"loss_options": {"clip": 0.1}}, "no option clip"),
        ({"epochs": 0}, "epochs: got 0"),
        ({"epochs": True}, r"params\.epochs: got True, wants int"),
        ({"objective": "value"}, "wants advantage 'gae'"),
        ({"advantage": "gae", "values": "v"}, "gae: needs values"),
        ({"advantage": "remax"}, "remax: needs baselines"),
        ({"score": {"column": "points"}}, "sample column 'points' is missing"),
        ({"kl": {"kind": "k9"}}, r"params\.kl: kind: got 'k9'"),
    ],
)
def test_bad_params_are_named(bench: Bench, params: Json, message: str) -> None:
    rejects(bench, message, params)


def test_samples_that_cannot_be_trained_on_are_named(bench: Bench) -> None:
    half = bench.samples.select(np.arange(6))
    rejects(bench, r"sample \(group 0, index 0\) is given twice", samples=[bench.samples, half])
    open_end = dataclasses.replace(bench.samples, finish=np.full(GROUPS * N, 0, np.int32))
    rejects(bench, r"\(group 0, index 0\) is unfinished", samples=[open_end])


def test_numbers_that_are_not_finite_are_named(bench: Bench) -> None:
    scores = bench.columns.sample["score"].copy()
    scores[6] = np.nan
    rejects(
        bench, "step 7, weights policy v000000.*score", columns=[Columns.of(bench.samples, sample={"score": scores})]
    )
    logprobs = bench.samples.logprobs.copy()
    offset = int(bench.samples.responses.offsets[9])
    first = int(np.flatnonzero(bench.samples.mask[offset:])[0])
    logprobs[offset + first] = -np.inf
    rejects(bench, "rollout_logprobs.*sequence 9", samples=[dataclasses.replace(bench.samples, logprobs=logprobs)])


def poisoned(bench: Bench, name: str, change: Any) -> Version:
    from tests.support.versions import publish

    tensors = fetch(bench.exchange, BASE)
    change(tensors[name])
    version = Version("bad", 0)
    publish(bench.exchange, version, tensors=tensors, state={}, trainer={}, model_files=None, parent=BASE)
    return version


def test_non_finite_log_probability_names_step_and_sample(bench: Bench) -> None:
    token = int(bench.samples.responses.rows()[8][0])

    def poison(embedding: Tensor) -> None:
        embedding[token] = float("nan")

    version = poisoned(bench, "model.embed_tokens.weight", poison)
    rejects(bench, r"step 7, weights bad v000000.*is nan at a token of sample \(group", version=version)


def test_non_finite_gradient_names_step_sample_and_parameter(bench: Bench) -> None:
    """Advantages so large that the loss (a difference of equals) is finite and its gradient is not."""
    base = SampleBatch.of_prompts([[4, 5], [6]], samples_per_prompt=2, version=0, first_group=3)
    samples = SampleBatch(
        base.prompts, base.prompt, base.group, base.index, Ragged.from_rows([[7], [8], [7], [8]], np.int32),
        np.full(4, -4, np.float32), np.ones(4, np.float32), np.ones(4, np.int32), base.version,
    )  # fmt: skip
    columns = Columns.of(samples, sample={"score": np.array([1.0, 0.0, 3.3e38, -3.3e38], np.float32)})
    message = (
        r"step 7, weights policy v000000.*gradient norm is (nan|inf): sample \(group 4, index 0\) .*parameter 'model"
    )
    params: Json = {"advantage": "dr_grpo", "micro_batch_tokens": 2}
    rejects(bench, message, params, samples=[samples], columns=[columns])


def test_stale_weights_are_refused(bench: Bench) -> None:
    bound: Json = {"optimizer": ADAM, "max_rollout_logprob_diff": 0.01}
    rejects(bench, r"weights policy v000000.*differ.*0\.01; the samples say that version 0", bound)
    rejects(bench, "stale weights", bound | {"epochs": 2})
    bench.call(bound | {"max_rollout_logprob_diff": 10.0})
