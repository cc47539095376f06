"""What a step decides of its whole batch: the same however it is packed; against numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from functions.algorithms.resample import resample
from functions.base.samples import Columns
from functions.base.wire import Json, Version
from functions.call.function import FatalError
from functions.models.pretrained import load_causal_lm
from functions.weights.manifest import read_manifest
from tests.support.train_call import Bench, close

SGD_LIKE: Json = {"lr": 1e-2, "eps": 1.0, "max_grad_norm": None}
SETTINGS: dict[str, Json] = {
    "clip_cov": {"loss": "clip_cov", "loss_options": {"cov_ratio": 0.2, "cov_low": 0.0, "cov_high": 9.0}},
    "kl_cov": {"loss": "kl_cov", "loss_options": {"cov_ratio": 0.2, "kl_coef": 1.0}, "mini_batches": 2},
    "quantile": {"top_entropy_quantile": 0.4},
    "normalised": {"correction": {"level": "sequence", "normalize": True}},
    "off-policy": {"off_policy_mask_threshold": 0.0},
    "token baseline": {"advantage": "optimal_token_baseline", "correction": {}},
    "tir": {"advantage": "tir_optimal_token_baseline"},
    "geo_mean": {"loss": "geo_mean", "aggregation": "seq-mean-token-mean", "correction": {}},
    "pf-ppo": {"resample": {"method": "max_random"}},
    "gdpo": {"advantage": "gdpo", "score": {"weights": {"score": 1.0, "form": 0.5}}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_packs_do_not_change_the_step(bench: Bench, name: str) -> None:
    params: Json = {"optimizer": SGD_LIKE} | SETTINGS[name]
    second = np.random.default_rng(1).random(len(bench.samples)).astype(np.float32)
    sample = dict(bench.columns.sample) | {"form": second}
    bench.columns = Columns.of(bench.samples, sample=sample, token=dict(bench.columns.token))
    one, many = (bench.call(params | {"micro_batch_tokens": budget}, id=f"b{budget}") for budget in (10_000, 25))
    assert many["stats"]["packs"] > one["stats"]["packs"]
    close(bench.weights(one), bench.weights(many), 1e-6)
    plain = bench.call({"optimizer": SGD_LIKE, "aggregation": params.get("aggregation", "token-mean")}, id="plain")
    moved = max(float((bench.weights(one)[key] - value).abs().max()) for key, value in bench.weights(plain).items())
    assert moved > 1e-6, "the setting had no effect"


def test_resampled_is_trained_on_as_if_it_had_been_sampled(bench: Bench) -> None:
    """The redrawn batch as inputs, with the advantages that the samples had: the same update."""
    again: Json = {"optimizer": SGD_LIKE, "resample": {"method": "max_random"}, "advantage": "gae"}
    again |= {"advantage_options": {"whiten_advantages": False}}
    drawn = resample(scores=torch.from_numpy(bench.columns.sample["score"]), method="max_random", power=2.0, seed=0)
    assert len(set(drawn.tolist())) < len(drawn)
    rows = drawn.numpy()
    samples = replace(bench.samples.select(rows), index=np.arange(len(rows), dtype=np.int32) + 100)
    places = bench.samples.responses.places(rows)
    columns = Columns.of(
        samples, sample={name: values[rows] for name, values in bench.columns.sample.items()},
        token={name: values[places] for name, values in bench.columns.token.items()},
    )  # fmt: skip
    plain = {key: value for key, value in again.items() if key != "resample"}
    close(
        bench.weights(bench.call(again)),
        bench.weights(bench.call(plain, id="given", samples=[samples], columns=[columns])), 1e-6,
    )  # fmt: skip


def test_topk_distillation_is_the_forward_kl_to_the_teacher(bench: Bench) -> None:
    """One step's loss against the student's own logits, sample by sample."""
    batch, rng = bench.samples, np.random.default_rng(0)
    tokens = int(batch.responses.lengths.sum())
    model = load_causal_lm(bench.directory)
    ids = np.argsort(rng.random((tokens, model.config.vocab_size)), 1)[:, :3].astype(np.float32)
    teacher = np.log(rng.dirichlet(np.ones(4), tokens)[:, :3]).astype(np.float32)
    expected, offsets = 0.0, batch.responses.offsets
    for row, response in enumerate(batch.responses.rows()):
        if len(response):
            prompt = batch.prompts.rows()[batch.prompt[row]]
            whole = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
            with torch.no_grad():
                log_q = torch.log_softmax(model(whole[None]).logits[0, len(prompt) - 1 : -1], -1)
            part = slice(int(offsets[row]), int(offsets[row + 1]))
            log_p = torch.from_numpy(teacher[part]).clamp(min=-10)
            of = log_q.gather(1, torch.from_numpy(ids[part]).long()).clamp(min=-10)
            losses = (log_p.exp() * (log_p - of)).sum(-1).clamp(0, 10)
            expected += float((losses * torch.from_numpy(batch.mask[part])).sum())
    token = dict(bench.columns.token) | {"teacher_ids": ids, "teacher_logprobs": teacher}
    bench.columns = Columns.of(batch, sample=dict(bench.columns.sample), token=token)
    data = bench.call({"optimizer": SGD_LIKE, "loss": "forward_kl_topk", "advantage": "dr_grpo"})
    assert data["metrics"]["actor/pg_loss"] == pytest.approx(expected / float(batch.mask.sum()), rel=1e-5)
    after = bench.weights(data)
    assert any(float((after[name] - value).abs().max()) > 0 for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"loss": "gspo"}, "aggregation: got 'token-mean', loss 'gspo' is always seq-mean-token-mean"),
        ({"top_entropy_quantile": 0}, "top_entropy_quantile: got 0.0, wants a share in"),
        ({"top_entropy_quantile": 0.5, "entropy_coef": 0.1}, "top_entropy_quantile: wants no entropy bonus"),
        ({"resample": {"method": "best"}}, "best"),
        ({"loss": "forward_kl_topk"}, "token column 'teacher_logprobs' is missing, loss 'forward_kl_topk' needs it"),
        ({"advantage": "gdpo", "score": {"weights": {"form": 1.0}}}, "sample column 'form' is missing"),
        ({"advantage": "grpo", "advantage_options": {"scale": "none"}}, "wants one of group, batch"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(bench: Bench, params: Json, line: str) -> None:
    with pytest.raises(FatalError, match=line):
        bench.call(params)


def test_the_entropy_bonus_follows_its_target(bench: Bench) -> None:
    """No bonus before an entropy is known; then by delta, up while the entropy is below the target."""
    params: Json = {"adaptive_entropy": {"target": 99.0, "delta": 0.25}, "entropy_coef": 0.5, "optimizer": SGD_LIKE}
    first = bench.call(params)
    plain = bench.call({"optimizer": SGD_LIKE}, id="plain")
    close(bench.weights(first), bench.weights(plain), 0.0)
    carry = read_manifest(bench.exchange, Version.from_json(first["version"])).trainer["carry"]
    assert carry == pytest.approx({"entropy_coef": 0.75, "entropy": first["metrics"]["actor/entropy"]})
