"""The train function whole: real exchange, real weights; against a step written out by hand with torch alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from functions.base.samples import Columns, Ragged, SampleBatch
from functions.base.wire import Call, Json, Version
from functions.call.function import Cancelled, FatalError
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import load_causal_lm, load_critic, score_head
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from functions.weights.manifest import manifest_key, read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import fetch
from tests.support.train_call import ADAM, BASE, GROUPS, Bench, N, close, make_samples, same_bits

# ---- the numbers


def by_hand(bench: Bench, *, kl: float, entropy_coef: float) -> tuple[dict[str, Tensor], float, float]:
    """GRPO's first step with token-mean, written out: (weights, loss, gradient norm). Sample by sample, no packing."""
    model = load_causal_lm(bench.directory)
    batch, scores = bench.samples, bench.columns.sample["score"].reshape(GROUPS, N)
    advantage = (scores - scores.mean(1, keepdims=True)) / (scores.std(1, ddof=1, keepdims=True) + 1e-6)
    advantage[1] = 0.0
    offsets, total = batch.responses.offsets, float(batch.mask.sum())
    loss = torch.zeros(())
    for row, response in enumerate(batch.responses.rows()):
        if not len(response):
            continue
        prompt = batch.prompts.rows()[batch.prompt[row]]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        log_p = torch.log_softmax(model(tokens[None]).logits[0, len(prompt) - 1 : -1] / 0.8, -1)
        logprob = log_p.gather(1, tokens[len(prompt) :, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        part = slice(int(offsets[row]), int(offsets[row + 1]))
        mask = torch.from_numpy(batch.mask[part])
        d = torch.from_numpy(bench.columns.token["ref_logprobs"][part]) - logprob
        k3 = (d.clamp(-20, 20).exp() - d.clamp(-20, 20) - 1).clamp(max=10)  # verl bounds the estimate
        ratio = (logprob - logprob.detach()).exp()
        terms = -ratio * float(advantage.reshape(-1)[row]) + kl * k3 - entropy_coef * entropy
        loss = loss + (terms * mask).sum() / total
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert float(norm) > 0.5  # clipping is at work
    named = dict(model.named_parameters())
    for parameter in named.values():
        gradient = parameter.grad
        assert gradient is not None
        # AdamW's first step: m / (1 - b1) = g, v / (1 - b2) = g^2
        decay = 0.1 if parameter.ndim > 1 else 0.0
        with torch.no_grad():
            parameter.mul_(1 - 1e-2 * decay).sub_(1e-2 * gradient / (gradient.abs() + 1e-8))
    return {name: p.detach() for name, p in named.items()}, float(loss.detach()), float(norm)


@pytest.mark.parametrize(("kl", "entropy_coef"), [(0.0, 0.0), (0.3, 0.05)])
def test_first_step_equals_one_written_out_by_hand(bench: Bench, kl: float, entropy_coef: float) -> None:
    weights, loss, norm = by_hand(bench, kl=kl, entropy_coef=entropy_coef)
    params: Json = {"optimizer": ADAM, "temperature": 0.8, "entropy_coef": entropy_coef, "micro_batch_tokens": 40}
    if kl:
        params["kl"] = {"where": "loss", "kind": "k3", "coef": kl}
    data = bench.call(params)
    metrics = data["metrics"]
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    ours = metrics["actor/pg_loss"] + kl * metrics.get("actor/kl_loss", 0.0) - entropy_coef * metrics["actor/entropy"]
    assert ours == pytest.approx(loss, rel=1e-5, abs=1e-6)
    got = bench.weights(data)
    sensitive = 0
    for name, tensor in weights.items():  # sign-like first step: where |g| is near eps the direction is noise
        off = (got[name] - tensor).abs() > 1e-5
        sensitive += int(off.sum())
    assert sensitive <= 3


def in_rows(bench: Bench, root: Path) -> Bench:
    """With the same model, computed in padded rows: it has a window that ends short of the longest sample's first
    token, seen from its last, whose states nobody wants."""
    directory = shutil.copytree(bench.directory, root / "windowed")
    config = json.loads((directory / "config.json").read_text())
    window = int((bench.samples.prompts.lengths[bench.samples.prompt] + bench.samples.responses.lengths).max()) - 1
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    (directory / "config.json").write_text(json.dumps(config))
    exchange = DirectoryExchange(root / "exchange-of-windowed")
    import_model(exchange, "policy", directory)
    return dataclasses.replace(bench, exchange=exchange, scratch=root / "scratch-of-windowed", directory=directory)


@pytest.mark.parametrize("shared", [True, False])
def test_micro_batches_do_not_change_the_step(bench: Bench, shared: bool, tmp_path: Path) -> None:
    bench = bench if shared else in_rows(bench, tmp_path)
    params: Json = {"optimizer": ADAM | {"eps": 1e-3}, "aggregation": "seq-mean-token-mean", "entropy_coef": 0.01}
    results = []
    for budget in (1, 25, 10_000):
        results.append(bench.call(params | {"micro_batch_tokens": budget}, id=f"budget-{budget}"))
    assert [r["stats"]["packs"] for r in results][2] == 1
    assert results[0]["stats"]["packs"] == 15  # one per sample with tokens
    assert {r["stats"]["shared_prefix"] for r in results} == {int(shared)}
    for other in results[1:]:
        close(bench.weights(results[0]), bench.weights(other), 1e-6)
        for name, value in results[0]["metrics"].items():
            assert other["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_packed_and_padded_steps_are_equal(bench: Bench, tmp_path: Path) -> None:
    rows = in_rows(bench, tmp_path)
    params: Json = {"optimizer": ADAM | {"eps": 1e-3}}
    packed = bench.call(params, id="packed")
    padded = rows.call(params, id="padded")
    assert packed["stats"]["computed_tokens"] < padded["stats"]["computed_tokens"]
    close(bench.weights(packed), rows.weights(padded), 1e-5)
    assert packed["metrics"]["actor/grad_norm"] == pytest.approx(padded["metrics"]["actor/grad_norm"], rel=1e-5)


def test_gradient_checkpointing_changes_nothing(bench: Bench) -> None:
    params: Json = {"optimizer": ADAM | {"eps": 1e-3}}
    plain, checkpointed = (
        bench.call(params | {"gradient_checkpointing": on}, id=f"checkpointing-{on}") for on in (False, True)
    )
    close(bench.weights(plain), bench.weights(checkpointed), 1e-6)


def test_bfloat16_trains_on_float32_masters(bench: Bench) -> None:
    small: Json = {"optimizer": {"lr": 1e-5}, "dtype": "bfloat16"}
    first = bench.call(small, id="one")
    exact = bench.call({"optimizer": {"lr": 1e-5}}, id="exact")
    assert {t.dtype for t in bench.weights(first).values()} == {torch.bfloat16}
    assert first["metrics"]["actor/entropy"] == pytest.approx(exact["metrics"]["actor/entropy"], abs=0.02)
    version = Version.from_json(first["version"])
    second = bench.call(small, id="two", version=version)
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = bench.state(first)[f"master/{name}"], bench.state(second)[f"master/{name}"]
    moved = (after - before).abs()
    assert 0 < float(moved.max()) < 3e-5  # far below bfloat16's resolution of most weights, and not lost
    assert torch.equal(bench.weights(second)[name], after.to(torch.bfloat16))


# ---- exactly once, and a pure function of its inputs


def test_order_of_arrival_does_not_matter(bench: Bench) -> None:
    params: Json = {"optimizer": ADAM}
    whole = bench.call(params, id="whole")
    order = np.random.default_rng(1).permutation(GROUPS * N)
    samples, columns = [], []
    for rows in np.array_split(order, 3):
        part = bench.samples.select(rows)
        lengths = bench.samples.responses.lengths
        samples.append(part)
        columns.append(Columns.of(part, sample={"score": bench.columns.sample["score"][rows]}))
        ref = Ragged(bench.columns.token["ref_logprobs"], lengths).select(rows).flat
        columns.append(Columns.of(part, token={"ref_logprobs": ref}))
    parts = bench.call(params, id="parts", samples=samples[::-1], columns=columns[::-1])
    same_bits(bench.weights(whole), bench.weights(parts))
    assert {k: v for k, v in whole["metrics"].items() if "values" not in k and "vf_" not in k} == parts["metrics"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_and_cold_replicas_give_the_same_bits(bench: Bench, dtype: str) -> None:
    params: Json = {
        "optimizer": ADAM | {"schedule": "cosine", "warmup_steps": 2, "total_steps": 8}, "epochs": 2,
        "mini_batches": 2, "dtype": dtype, "kl": {"where": "reward", "kind": "k1", "coef": 0.1, "target": 0.5},
    }  # fmt: skip
    ends = []
    for kind in ("warm", "cold"):
        warm, version = TrainFunction(device="cpu"), BASE
        for step in range(3):
            function = warm if kind == "warm" else None
            data = bench.call(params, id=f"{kind}-{step}", version=version, function=function)
            version = Version.from_json(data["version"])
        ends.append(data)
    same_bits(bench.weights(ends[0]), bench.weights(ends[1]))
    same_bits(bench.state(ends[0]), bench.state(ends[1]))
    assert ends[0]["metrics"] == ends[1]["metrics"]
    manifests = [read_manifest(bench.exchange, Version.from_json(end["version"])) for end in ends]
    for manifest in manifests:
        del manifest.trainer["result"]["mismatch"]["key"]  # it has the call's id
    assert manifests[0].trainer == manifests[1].trainer
    assert manifests[0].trainer["optimizer_steps"] == 12
    assert manifests[0].trainer["carry"]["kl_coef"] != 0.1


def test_a_warm_replica_serves_another_version(bench: Bench) -> None:
    function = TrainFunction(device="cpu")
    one = bench.call({"optimizer": ADAM}, id="one", function=function)
    again = bench.call({"optimizer": ADAM}, id="again", function=function)  # from the base again, not from `one`
    same_bits(bench.weights(one), bench.weights(again))


def test_a_repeated_call_does_not_train_again(bench: Bench) -> None:
    first = bench.call({"optimizer": ADAM})
    key = manifest_key(Version.from_json(first["version"]))
    written = bench.exchange.get(key)
    other, _ = make_samples(seed=5)  # would train something else if it trained
    second = bench.call({"optimizer": ADAM}, samples=[other])
    assert {**first, "memory": {}} == second, "what was measured is of the call that trained"
    assert bench.exchange.get(key) == written


def test_a_call_that_died_before_its_manifest_trains_whole(bench: Bench) -> None:
    function = TrainFunction(device="cpu")
    first = bench.call({"optimizer": ADAM}, function=function)
    expected = bench.weights(first)
    bench.exchange.delete(manifest_key(Version.from_json(first["version"])))
    second = bench.call({"optimizer": ADAM}, function=function)  # the replica holds weights that do not count
    same_bits(expected, bench.weights(second))


def test_a_cancelled_call_publishes_nothing_and_leaves_no_trace(bench: Bench) -> None:
    function, context = TrainFunction(device="cpu"), bench.context()
    seen: list[Any] = []

    def progress(data: Any) -> None:
        seen.append(dict(data))
        if len(seen) == 3:
            context.cancelled.set()

    context = dataclasses.replace(context, progress=progress, cancelled=threading.Event())
    params: Json = {"optimizer": ADAM, "micro_batch_tokens": 1, "mini_batches": 4}
    with pytest.raises(Cancelled):
        bench.call(params, function=function, context=context)
    assert not bench.exchange.list("weights/policy/v000001")
    after = bench.call(params, function=function)
    same_bits(bench.weights(after), bench.weights(bench.call(params, id="fresh")))


# ---- objectives and options


def test_value_objective_learns_a_target(bench: Bench) -> None:
    """The score tells whether the first response token is even; the critic must come to see it from the states."""
    rows = bench.samples.responses.rows()
    scores = np.array([float(len(r) > 0 and r[0] % 2 == 0) for r in rows], np.float32)
    function, version, errors = TrainFunction(device="cpu"), BASE, []
    params: Json = {
        "model": "critic", "objective": "value", "advantage": "gae", "value_clip": None,
        "optimizer": {"lr": 5e-3, "max_grad_norm": None},
        "advantage_options": {"lam": 1.0, "whiten_advantages": False},
    }  # fmt: skip
    zero = np.zeros(len(bench.samples.logprobs), np.float32)
    for step in range(30):
        columns = [Columns.of(bench.samples, sample={"score": scores}, token={"values": zero})]
        data = bench.call(params, id=f"v{step}", version=version, function=function, columns=columns)
        version = Version.from_json(data["version"])
        errors.append(data["metrics"]["critic/vf_loss"])
    mean = float(np.mean([scores[i] for i, r in enumerate(rows) for _ in r]))
    assert errors[0] == pytest.approx(
        0.5 * np.average(scores**2, weights=[len(r) for r in rows]), abs=0.05
    )  # zero head
    constant = 0.5 * mean * (1 - mean)  # what a constant could reach
    unseen = sum(len(r) > 0 for r in rows) / sum(len(r) for r in rows)  # the value before the token cannot know it
    assert errors[-1] < (unseen + 0.1) * constant
    assert version.model == "critic"
    model = load_critic(materialize(bench.exchange, version, bench.scratch / "critic"))
    assert float(score_head(model).weight.detach().abs().max()) > 0


def test_learning_raises_the_probability_of_what_was_rewarded(bench: Bench) -> None:
    function, version = TrainFunction(device="cpu"), BASE
    for step in range(8):
        data = bench.call(
            {"optimizer": {"lr": 3e-3}, "loss": "importance_sampling", "advantage": "rloo"},
            id=f"s{step}", version=version, function=function,
        )  # fmt: skip
        version = Version.from_json(data["version"])
    assert data["metrics"]["rollout_corr/kl"] != 0
    before, after = (
        load_causal_lm(d) for d in (bench.directory, materialize(bench.exchange, version, bench.scratch / "m"))
    )
    scores = bench.columns.sample["score"].reshape(GROUPS, N)
    for group in (0, 2, 3):
        best, worst = int(scores[group].argmax()), int(scores[group].argmin())
        gain = [
            _logprob(after, bench.samples, group * N + i) - _logprob(before, bench.samples, group * N + i)
            for i in (best, worst)
        ]
        assert gain[0] > gain[1]


def _logprob(model: Any, batch: SampleBatch, row: int) -> float:
    prompt, response = batch.prompts.rows()[batch.prompt[row]], batch.responses.rows()[row]
    tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
    with torch.no_grad():
        log_p = torch.log_softmax(model(tokens[None]).logits[0, len(prompt) - 1 : -1], -1)
    return float((log_p.gather(1, tokens[len(prompt) :, None])[:, 0] * torch.from_numpy(
        Ragged(batch.mask, batch.responses.lengths).rows()[row])).sum())  # fmt: skip


def test_mini_batches_step_once_each_on_whole_prompts(bench: Bench) -> None:
    """Two mini-batches equal two calls on half the prompts each, with the old log-probabilities of the start."""
    params: Json = {"optimizer": ADAM | {"eps": 1e-3}}
    both = bench.call(params | {"mini_batches": 2}, id="both")
    assert both["stats"]["optimizer_steps"] == 2
    halves = [bench.samples.select(np.arange(a, a + 2 * N)) for a in (0, 2 * N)]
    first = bench.call(params, id="first", samples=halves[:1])
    from functions.reference.function import ReferenceFunction

    ref = bench.exchange.put("batches/half", halves[1].encode())
    call = Call("old", "logprobs", {"samples": [ref]}, {"model": BASE}, {"column": "old_logprobs"})
    (event,) = ReferenceFunction(device="cpu").call(call, bench.context())
    assert event.ref is not None
    old = Columns.decode(bench.exchange.get(event.ref))
    second = bench.call(
        params,
        id="second",
        samples=halves[1:],
        columns=[bench.columns, old],
        version=Version.from_json(first["version"]),
    )
    close(bench.weights(both), bench.weights(second), 1e-6)
    assert both["metrics"]["actor/ppo_kl"] != 0


def test_old_logprobs_of_a_column_are_used(bench: Bench) -> None:
    _, columns = make_samples()
    data = bench.call({"optimizer": ADAM}, columns=[columns])
    assert data["metrics"]["actor/pg_clipfrac"] > 0  # random old log-probabilities: ratios far from 1


def test_filtered_groups_and_dropped_samples_train_nothing(bench: Bench) -> None:
    data = bench.call({"optimizer": ADAM, "filter_groups": True, "dropped": [[0, 1], [3, 2]]}, id="dropped")
    assert data["stats"]["samples"] == GROUPS * N - 2
    keep = [i for i in range(GROUPS * N) if i not in (1, 14) and not N <= i < 2 * N]
    alone = bench.call({"optimizer": ADAM}, id="alone", samples=[bench.samples.select(keep)])
    same_bits(bench.weights(data), bench.weights(alone))


@pytest.mark.parametrize(
    "params",
    [
        {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm", "max_response_length": 12},
        {"advantage": "reinforce_plus_plus", "advantage_options": {"gamma": 0.9},
         "kl": {"where": "reward", "kind": "k2"}},
        {"advantage": "reinforce_plus_plus_baseline"},
        {"advantage": "remax"},
        {"advantage": "gae", "advantage_options": {"lam": 0.9}},
        {"advantage": "distillation", "loss": "importance_sampling"},
        {"loss": "gspo", "aggregation": "seq-mean-token-mean", "mini_batches": 2},
        {"loss": "cispo", "loss_options": {"clip_high": 3.0}, "epochs": 2},
        {"loss_options": {"clip_high": 0.28, "dual_clip": 10.0}, "score": {"overlong_buffer": 4, "mask_overlong": True},
         "max_response_length": 11, "filter_groups": True},
        {"correction": {"level": "token", "cap": 2.0, "reject": {"token_k1": [0.1, 10.0]}}},
        {"correction": {"level": "token", "cap": 5.0, "floor": 0.01}},
        {"correction": {"level": "sequence", "cap": 3.0}},
        {"advantage": "gae", "cost": {"limit": 0.1, "lr": 0.5}},
    ],
)  # fmt: skip
def test_every_algorithm_takes_a_step(bench: Bench, params: Json) -> None:
    rng = np.random.default_rng(2)
    extra = Columns.of(
        bench.samples,
        sample={"baseline": rng.random(GROUPS * N).astype(np.float32), "cost": np.ones(GROUPS * N, np.float32)},
        token={"cost_values": rng.random(len(bench.samples.logprobs)).astype(np.float32)},
    )
    data = bench.call(params | {"optimizer": {"lr": 1e-3}}, columns=[bench.columns, extra])
    base = fetch(bench.exchange, BASE)
    moved = max(float((tensor - base[name]).abs().max()) for name, tensor in bench.weights(data).items())
    assert 0 < moved < 1.5e-3 * data["stats"]["optimizer_steps"]
    if "cost" in params:
        assert data["metrics"]["actor/cost_multiplier"] > 1.0  # costs are above the limit
        version = Version.from_json(data["version"])
        again = bench.call(params, id="next", version=version, columns=[bench.columns, extra])
        assert again["metrics"]["actor/cost_multiplier"] > data["metrics"]["actor/cost_multiplier"]


def test_schedule(bench: Bench) -> None:
    function, version, rates = TrainFunction(device="cpu"), BASE, []
    schedule = {"lr": 1.0e-3, "schedule": "linear", "warmup_steps": 2, "total_steps": 6, "min_lr_ratio": 0.1}
    for step in range(4):
        data = bench.call({"optimizer": schedule, "mini_batches": 2}, id=f"s{step}", version=version, function=function)
        version = Version.from_json(data["version"])
        rates.append(data["metrics"]["actor/lr"])
    assert rates == pytest.approx([1e-3, 7.75e-4, 3.25e-4, 1e-4])


OWN = """
from functions.algorithms import advantages, policy_losses


def advantage(*, scores, group, segment, mask):
    return advantages.grpo(scores=scores, group=group, segment=segment, mask=mask)


def loss(*, logprobs, advantages, segment, mask, totals, aggregation, scale=1.0):
    loss, metrics = policy_losses.importance_sampling(
        logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=advantages * scale, segment=segment, mask=mask,
        totals=totals, aggregation=aggregation,
    )
    return loss, metrics
"""


def test_a_users_own_advantage_and_loss(bench: Bench) -> None:
    """On the first pass the ratio is 1: the plain policy gradient has the gradient of the clipped loss."""
    own = bench.scratch.parent / "own.py"
    own.write_text(OWN)
    known = bench.call({"optimizer": {"lr": 1e-3}}, id="known")
    mine = bench.call({"optimizer": {"lr": 1e-3}} | {"advantage": f"{own}:advantage", "loss": f"{own}:loss"}, id="mine")
    close(bench.weights(known), bench.weights(mine), 1e-6)
    turned = bench.call(
        {"optimizer": {"lr": 1e-3}} | {"loss": f"{own}:loss", "loss_options": {"scale": -1.0}}, id="turned"
    )
    assert turned["metrics"]["actor/pg_loss"] == pytest.approx(-mine["metrics"]["actor/pg_loss"], abs=1e-6)
    with pytest.raises(FatalError, match="has no 'lost'"):
        bench.call({"loss": f"{own}:lost"}, id="lost")


def test_each_of_several_rewards_is_a_metric(bench: Bench) -> None:
    values = np.arange(len(bench.samples), dtype=np.float32)
    columns = dataclasses.replace(bench.columns, sample={**bench.columns.sample, "brief": values})
    metrics = bench.call({"optimizer": ADAM, "score": {"weights": {"brief": 0.5}}}, columns=[columns])["metrics"]
    assert metrics["rewards/brief/mean"] == pytest.approx(values.mean())
    assert metrics["rewards/brief/std"] == pytest.approx(values.std())
