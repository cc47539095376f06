"""Gangs of real processes over gloo: N ranks make the step of one, all of them or none, once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import Call, Json, Version
from functions.call.function import Context, FatalError
from functions.exchange.base import NotFound
from functions.exchange.directory import DirectoryExchange
from functions.models.packing import make_packs
from functions.models.pretrained import load_causal_lm
from functions.train.function import TrainFunction
from functions.train.parallel import share
from functions.weights.base import import_model
from functions.weights.local_copy import LocalCopy
from functions.weights.manifest import read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import fetch
from tests.support.gang import ranks_of, run_gang, run_gangs
from tests.support.gang_bench import GROUPS, GangBench, N, ragged_batch
from tests.support.train_call import save_tiny

pytestmark = pytest.mark.timeout(300)

VOCABULARY = 53
BASE = Version("policy", 0)
OPTIMIZER: Json = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
GRPO: Json = {
    "optimizer": OPTIMIZER, "temperature": 0.8, "entropy_coef": 0.01, "micro_batch_tokens": 30,
    "kl": {"where": "loss", "kind": "k3", "coef": 0.3},
}  # fmt: skip
VALUE: Json = {
    "optimizer": OPTIMIZER | {"max_grad_norm": None}, "objective": "value", "advantage": "gae", "model": "critic",
    "mini_batches": 2, "epochs": 2, "value_clip": None,
}  # fmt: skip


@dataclass(frozen=True)
class Bench(GangBench):
    directory: Path
    samples: SampleBatch

    def call(self, id: str, params: Json, version: Version = BASE) -> Call:
        """On the samples as if `version` had made them."""
        samples = replace(self.samples, version=np.full_like(self.samples.version, version.number))
        ref = self.exchange.put(f"batches/v{version.number}", samples.encode())
        params = {"max_rollout_logprob_diff": "off", **params}  # nobody sampled these
        return Call(id, "train", self.inputs | {"samples": [ref]}, {"policy": version}, params, step=3)

    def gang(self, call: Call, size: int) -> Json:
        """The answer of all ranks, which is one and the same."""
        first, *others = [e.data for e in run_gang(self.root, self.scratch, ranks_of(call, size))]
        assert all(other == first for other in others)
        return first


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    save_tiny(tmp_path / "model", intermediate_size=50)
    exchange = DirectoryExchange(tmp_path / "exchange")
    import_model(exchange, "policy", tmp_path / "model")
    samples, inputs = ragged_batch(exchange, VOCABULARY, 11)
    return Bench(exchange, tmp_path / "exchange", tmp_path / "scratch", inputs, tmp_path / "model", samples)


def assert_equal_step(bench: Bench, one: Json, many: Json, *, in_order: bool = True, atol: float = 1e-6) -> None:
    """Weights, moments and metrics of two answers, to `atol`; manifests of the same form. Where stages wrote one of
    them an untied head comes after the layers."""
    ours, theirs = bench.manifest(one), bench.manifest(many)
    for kind in ("tensors", "state"):
        forms = [[(e.name, e.dtype, e.shape) for e in getattr(manifest, kind)] for manifest in (ours, theirs)]
        if not in_order:
            forms = [sorted(form) for form in forms]
        assert forms[0] == forms[1]
    assert ours.files == theirs.files
    assert ours.parent == theirs.parent
    assert ours.trainer["optimizer_steps"] == theirs.trainer["optimizer_steps"]
    a, b = bench.tensors(one), bench.tensors(many)
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=0, atol=atol)
    assert one["metrics"].get("actor/grad_norm", one["metrics"].get("critic/grad_norm")) > 0.01
    for name, value in one["metrics"].items():
        assert many["metrics"][name] == pytest.approx(value, rel=100 * atol, abs=10 * atol), name


@pytest.mark.parametrize(
    ("size", "params"),
    [(2, GRPO), (3, GRPO | {"kl": {"where": "reward", "coef": 0.1}}), (2, VALUE), (3, VALUE)],
    ids=["policy-2", "policy-3", "value-2", "value-3"],
)
def test_ranks_make_the_step_of_one(bench: Bench, size: int, params: Json) -> None:
    """Two steps, the second from the first's optimizer state; three ranks do not divide the tensors evenly."""
    one = bench.alone(bench.call("one", params))
    many = bench.gang(bench.call("many", params), size)
    assert many["stats"]["ranks"] == size
    assert_equal_step(bench, one, many)
    version = Version.from_json(one["version"])
    if size == 2:
        one, many = (
            bench.alone(bench.call("one-more", params, version)),
            bench.gang(bench.call("many-more", params, version), size),
        )
        assert_equal_step(bench, one, many)
    if params is GRPO:
        directory = materialize(bench.exchange, Version.from_json(many["version"]), bench.scratch / "whole")
        load_causal_lm(directory)  # what a gang publishes is a model like any other


def test_ranks_that_read_their_packs_alone_make_the_step_of_one(bench: Bench) -> None:
    """A teacher's top-k by pack; what the correction, or old log-probabilities, want of all; samples drawn anew."""
    rng, tokens = np.random.default_rng(2), len(bench.samples.mask)
    ids = np.argsort(rng.random((tokens, VOCABULARY)), 1)[:, :4].astype(np.float32)
    teacher = np.sort(rng.uniform(-6, -1, (tokens, 4)).astype(np.float32), 1)[:, ::-1]
    columns = Columns.decode(bench.exchange.get(bench.inputs["columns"][0]))
    token = {**columns.token, "teacher_ids": ids, "teacher_logprobs": teacher}
    inputs = bench.inputs | {"columns": [bench.exchange.put("batches/k", replace(columns, token=token).encode())]}
    correction = {"level": "token", "normalize": True, "reject": {"token_k2": 1.0}}
    cases: dict[str, Json] = {
        "teacher": {"loss": "forward_kl_topk", "advantage": "dr_grpo"},
        "corrected": GRPO | {"correction": correction, "mini_batches": 2},
        "bounded": GRPO | {"max_rollout_logprob_diff": 50.0, "epochs": 2},
        "drawn": GRPO | {"resample": {"method": "pow"}},
    }
    calls = [bench.call(f"many-{name}", {"optimizer": OPTIMIZER, **params}) for name, params in cases.items()]
    calls = [replace(call, inputs={**call.inputs, "columns": inputs["columns"]}) for call in calls]
    gangs = run_gangs(bench.root, bench.scratch, [ranks_of(call, 2) for call in calls])
    for call, (first, other) in zip(calls, gangs, strict=True):
        assert first.data == other.data
        assert_equal_step(bench, bench.alone(replace(call, id=call.id.replace("many", "one"))), first.data)
    nothing = bench.call("nothing", GRPO | {"dropped": [[g, i] for g in range(GROUPS) for i in range(N)]})
    assert bench.gang(nothing, 2)["metrics"]["actor/skipped_updates"] == 1
    params = GRPO | {"max_rollout_logprob_diff": 1e-3, "epochs": 2}
    ended = run_gangs(bench.root, bench.scratch, [ranks_of(bench.call("stale", params), 2)])[0]
    with pytest.raises(FatalError, match="rollout log-probabilities differ") as alone:
        bench.alone(bench.call("stale-one", params))
    assert [rank.event.data["message"] for rank in ended if rank.event is not None] == [str(alone.value)] * 2


@pytest.mark.parametrize(
    "extra",
    [{"lora": {"rank": 4, "alpha": 8.0}, "gradient_checkpointing": True}, {"dtype": "bfloat16"}],
    ids=["lora", "bfloat16"],
)
def test_adapters_and_masters_are_sharded_too(bench: Bench, extra: Json) -> None:
    one, many = bench.alone(bench.call("one", GRPO | extra)), bench.gang(bench.call("many", GRPO | extra), 2)
    if "dtype" not in extra:
        assert_equal_step(bench, one, many)
        return
    a, b = bench.tensors(one), bench.tensors(many)
    assert {name: t.dtype for name, t in a.items()} == {name: t.dtype for name, t in b.items()}
    for name in a:  # bfloat16 products differ with the packs: the masters' step is lr at most
        torch.testing.assert_close(b[name].float(), a[name].float(), rtol=1e-2, atol=2e-2)


def test_the_ranks_together_say_what_changed(bench: Bench) -> None:
    """Tensors of several blocks, which lie with several ranks; what each changed leads on from what all had."""
    save_tiny(bench.scratch / "wide", intermediate_size=2000)
    base = import_model(bench.exchange, "wide", bench.scratch / "wide")
    params = GRPO | {"dtype": "bfloat16", "model": "wide", "optimizer": {"lr": 1e-6}}
    first = bench.gang(bench.call("first", params, base), 3)
    parent = Version.from_json(first["version"])
    second = bench.gang(bench.call("second", params, parent), 3)
    manifest = bench.manifest(second)
    (wide,) = [e for e in manifest.tensors if e.name == "model.layers.0.mlp.up_proj.weight"]
    assert len({piece.key for piece in wide.pieces}) == 3
    assert len(manifest.delta) > 1
    old, new = (fetch(bench.exchange, Version.from_json(data["version"])) for data in (first, second))
    differing = sum(int((old[name] != new[name]).sum()) for name in new)
    assert second["stats"]["changed_weights"] == differing / sum(t.numel() for t in new.values()) > 0
    assert second["stats"]["delta_bytes"] == sum(ref.size_bytes for ref in manifest.delta)
    copy, context = LocalCopy(bench.scratch / "copy"), Context(bench.exchange, str(bench.scratch))
    copy.bring(bench.exchange, parent, context.phase)
    arrival = copy.bring(bench.exchange, manifest.version, context.phase)  # every tensor's hash is checked
    assert arrival.changes is not None
    assert "delta_bytes" not in first["stats"]  # from a float32 model
    one = bench.alone(bench.call("alone", params, manifest.version))  # a cold trainer alone goes on from there
    assert bench.manifest(one).delta
    assert set(bench.exchange.list(manifest.version.prefix)) <= manifest.keys()


def test_more_ranks_than_packs(bench: Bench) -> None:
    """Ranks without a pack make idle passes: they change nothing."""
    dropped = [[g, i] for g in range(GROUPS) for i in range(N) if (g, i) != (2, 1)]
    params: Json = {"optimizer": OPTIMIZER, "advantage": "grpo", "kl": GRPO["kl"], "dropped": dropped}
    one, many = bench.alone(bench.call("one", params)), bench.gang(bench.call("many", params), 2)
    assert many["stats"]["packs"] == 1
    assert_equal_step(bench, one, many)


def test_a_killed_rank_ends_all_and_the_next_attempt_makes_the_version(bench: Bench) -> None:
    call = bench.call("doomed", GRPO)
    killed, survivor = reversed(run_gang(bench.root, bench.scratch, ranks_of(call, 2), die=1))
    assert killed.exit_code == -9
    assert survivor.event is not None
    assert survivor.event.kind == "error"
    assert survivor.event.data["kind"] == "retryable"
    version = Version("policy", 1, hashlib.sha256(b"doomed").hexdigest()[:12])
    with pytest.raises(NotFound):
        read_manifest(bench.exchange, version)
    data = bench.gang(call, 2)
    assert Version.from_json(data["version"]) == version
    assert_equal_step(bench, bench.alone(bench.call("one", GRPO)), data)


def test_a_repeated_gang_trains_nothing(bench: Bench) -> None:
    """A published version answers for every rank, of a gang of any size, even where the samples are gone."""
    call = bench.call("once", GRPO)
    data = bench.alone(call)
    bench.exchange.delete("batches/")
    for rank in ranks_of(call, 3):
        (event,) = TrainFunction(device="cpu").call(rank, Context(bench.exchange, str(bench.scratch)))
        assert dict(event.data) == data | {"memory": {}}, "what it took to train it is not told again"


def test_what_is_fatal_for_one_rank_is_fatal_for_all(bench: Bench) -> None:
    """A non-finite number in the share of one rank: its peer, which sees none, ends with the same reason."""
    columns = Columns.decode(bench.exchange.get(bench.inputs["columns"][0]))
    columns.token["ref_logprobs"][:1] = np.nan
    inputs = bench.inputs | {"columns": [bench.exchange.put("batches/nan", columns.encode())]}
    ended = run_gang(bench.root, bench.scratch, ranks_of(replace(bench.call("nan", GRPO), inputs=inputs), 2))
    errors = [e.event.data for e in ended if e.event is not None]
    assert [e["kind"] for e in errors] == ["fatal", "fatal"]
    assert errors[0]["message"] == errors[1]["message"]
    assert "reference_logprobs: nan" in errors[0]["message"]


def test_a_value_that_is_gone_is_named_by_all_ranks(bench: Bench) -> None:
    """One of them reads it; the caller makes it again, whichever rank's answer it sees."""
    call = bench.call("gone", GRPO)
    bench.exchange.delete("batches/c")
    errors = [e.event.data for e in run_gang(bench.root, bench.scratch, ranks_of(call, 2)) if e.event is not None]
    assert [error["lost"] for error in errors] == ["batches/c"] * 2


def test_gang_params_are_checked(bench: Bench) -> None:
    context = Context(bench.exchange, str(bench.scratch))
    wrong: list[tuple[Callable[[Json], Json], str]] = [
        (lambda gang: gang | {"rank": 2}, "rank 2 of a gang of 2"),
        (lambda gang: gang | {"world": 2}, "params.gang: unknown key 'world'"),
    ]
    for change, message in wrong:
        call = ranks_of(bench.call("wrong", GRPO), 2)[0]
        params = {**call.params, "gang": change(call.params["gang"])}
        with pytest.raises(FatalError, match=message):
            list(TrainFunction(device="cpu").call(replace(call, params=params), context))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_a_partition_in_step(bench: Bench, size: int) -> None:
    """Every sample in one rank's packs, the same number of passes on every rank, none with twice a fair load."""

    def packs_of(budget: int) -> list[object]:
        return make_packs(bench.samples, range(GROUPS * N), budget_tokens=budget, shared=True)  # type: ignore[return-value]

    shares = [share(packs_of, 1000, rank, size) for rank in range(size)]  # type: ignore[arg-type]
    rows = sorted(row for part in shares for pack in part.packs for row in pack.rows)
    assert rows == list(range(GROUPS * N))
    assert len({len(part.packs) + part.idle for part in shares}) == 1
    loads = [sum(pack.tokens.numel() for pack in part.packs) for part in shares]
    assert {part.tokens for part in shares} == {sum(loads)}
    assert max(loads) <= 2 * sum(loads) / size
