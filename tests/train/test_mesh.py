"""Meshes of real processes over gloo: an update under each is that of one rank, for every architecture that divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from functions.base.wire import Call, Json, Version
from functions.call.parallel import SPLIT_ARCHITECTURES, Parallel
from functions.exchange.directory import DirectoryExchange
from functions.weights.base import import_model
from tests.support.architectures import VOCABULARY, tiny_model
from tests.support.gang import ranks_of, run_gangs
from tests.support.gang_bench import GROUPS, GangBench, N, ragged_batch

pytestmark = pytest.mark.timeout(300)

OPTIMIZER: Json = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
GRPO: Json = {
    "optimizer": OPTIMIZER, "temperature": 0.8, "entropy_coef": 0.01, "micro_batch_tokens": 30,
    "kl": {"where": "loss", "kind": "k3", "coef": 0.3}, "max_rollout_logprob_diff": "off",
}  # fmt: skip
MUON = OPTIMIZER | {"optimizer": "muon", "optimizer_offload": True, "lr": 3e-4}  # its products are in bfloat16
OFFLOADED = OPTIMIZER | {"optimizer_offload": True}
VALUE: Json = {
    "optimizer": OPTIMIZER | {"max_grad_norm": None}, "objective": "value", "advantage": "gae",
    "mini_batches": 2, "epochs": 2, "value_clip": None,
}  # fmt: skip
WIDE: Mapping[str, Any] = {"num_key_value_heads": 4}
"""For four ranks."""
ONE_LEFT = [[g, i] for g in range(GROUPS) for i in range(N) if (g, i) != (2, 1)]
MESHES = {
    "tp2": (2, Parallel(tp=2)), "tp4": (4, Parallel(tp=4)), "dp2xtp2": (4, Parallel(tp=2)), "dp4": (4, Parallel()),
    "cp2": (2, Parallel(cp=2)), "dp2xcp2": (4, Parallel(cp=2)), "pp2": (2, Parallel(pp=2)),
    "dp2xpp2": (4, Parallel(pp=2)), "tp2xpp2": (4, Parallel(tp=2, pp=2)),
}  # fmt: skip


@dataclass(frozen=True)
class Bench(GangBench):
    """Models of several architectures, one ragged batch for all of them."""

    replayed: Json
    """Inputs of the same samples with experts, any of four in two layers."""

    @classmethod
    def make(cls, path: Path, models: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Bench:
        exchange = DirectoryExchange(path / "exchange")
        for name, (kind, changes) in models.items():
            import_model(exchange, name, tiny_model(kind, path / name, **changes))
        samples, inputs = ragged_batch(exchange, VOCABULARY, 8)
        every = np.tile(np.arange(4, dtype=np.uint8), (len(samples.mask), 2, 1))
        experts = np.random.default_rng(1).permuted(every, axis=2)
        again = exchange.put("batches/experts", replace(samples, experts=experts[:, :, :2]).encode())
        return cls(exchange, path / "exchange", path / "scratch", inputs, {**inputs, "samples": [again]})

    def call(self, id: str, model: str, params: Json) -> Call:
        return Call(id, "train", self.inputs, {"policy": Version(model, 0)}, {"model": model, **params}, step=3)

    def difference(self, one: Json, many: Json, atol: float) -> float:
        """The largest of weights and moments; manifests have the same entries, metrics are the same."""
        ours, theirs = self.manifest(one), self.manifest(many)
        for kind in ("tensors", "state"):
            forms = [sorted((e.name, e.dtype, e.shape) for e in getattr(m, kind)) for m in (ours, theirs)]
            assert forms[0] == forms[1]
        for name, value in one["metrics"].items():
            assert many["metrics"][name] == pytest.approx(value, rel=100 * atol, abs=atol), name
        a, b = self.tensors(one), self.tensors(many)
        return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


@dataclass(frozen=True)
class Case:
    kind: str
    mesh: str
    params: Json
    changes: Mapping[str, Any] = field(default_factory=dict)
    atol: float = 1e-5
    replay: bool = False

    @property
    def model(self) -> str:
        return "-".join((self.kind, *map(str, self.changes.values())))


def check(path: Path, cases: Sequence[Case], device: str = "cpu") -> None:
    """Each case's update is that of one rank on a CPU. All run in the same processes, one after the other."""
    bench = Bench.make(path, {case.model: (case.kind, {**WIDE, **case.changes}) for case in cases})
    calls = [bench.call(f"{number}-{case.mesh}", case.model, case.params) for number, case in enumerate(cases)]
    calls = [replace(call, inputs=bench.replayed) if case.replay else call
             for call, case in zip(calls, cases, strict=True)]  # fmt: skip
    gangs = [ranks_of(call, *MESHES[case.mesh]) for call, case in zip(calls, cases, strict=True)]
    ended = run_gangs(bench.root, bench.scratch, gangs, device=device)
    for case, call, ranks in zip(cases, calls, ended, strict=True):
        one = bench.alone(replace(call, id=f"{call.id}-alone"))
        assert all(rank.data["version"] == ranks[0].data["version"] for rank in ranks)
        difference = bench.difference(one, ranks[0].data, case.atol)
        print(f"{case.model} {case.mesh}: {difference:.1e}")
        assert difference < case.atol, case
        if case.replay:
            plain = bench.alone(bench.call(f"{call.id}-plain", case.model, case.params))
            assert bench.difference({**plain, "metrics": {}}, one, case.atol) > 10 * case.atol, "experts matter"


def test_an_update_is_that_of_one_rank(tmp_path: Path) -> None:
    sampled = {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2, "epochs": 2, "top_entropy_quantile": 0.8}
    cases = [
        Case("qwen3_moe", "dp2xtp2", GRPO),
        Case("qwen3_moe", "dp2xtp2", GRPO | {"optimizer": MUON}, replay=True),
        Case("qwen3_moe", "pp2", GRPO | {"optimizer": MUON}, replay=True),
        Case("qwen3_moe", "cp2", GRPO, replay=True),
        Case("qwen2", "dp2xtp2", VALUE),
        Case("qwen3", "dp2xcp2", GRPO),
        Case("gemma3_text", "tp2", GRPO | {"entropy_coef": 0.0, **sampled}),
    ]
    check(tmp_path, cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_architecture_under_every_mesh(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    cases = [
        Case(kind, mesh, GRPO) for kind in ("gemma3_text", "llama", "qwen2", "qwen3", "qwen3_moe") for mesh in MESHES
    ]
    cases += [Case("qwen3", "dp2xcp2", VALUE), Case("llama", "dp2xcp2", GRPO, tied)]
    cases += [Case("llama", "cp2", GRPO | {"lora": {"rank": 4, "alpha": 8.0}})]
    cases += [Case(kind, "dp2xtp2", GRPO) for kind in sorted(SPLIT_ARCHITECTURES - {case.kind for case in cases})]
    cases += [Case(kind, "dp2xtp2", GRPO, tied) for kind in ("llama", "qwen2", "qwen3", "qwen3_moe")]
    cases += [Case(kind, mesh, VALUE) for kind in ("gemma3_text", "llama", "qwen3") for mesh in ("tp2", "dp2xtp2")]
    cases += [Case("qwen3", mesh, GRPO | {"gradient_checkpointing": True}) for mesh in ("tp2", "cp2")]
    cases += [Case("llama", mesh, GRPO | {"optimizer": MUON}) for mesh in MESHES]
    cases += [Case("qwen3", mesh, GRPO | {"optimizer": OFFLOADED}) for mesh in ("tp2", "pp2", "dp2xpp2", "tp2xpp2")]
    cases += [Case("qwen3_moe", mesh, GRPO | more, replay=True)
              for mesh in MESHES for more in ({}, {"gradient_checkpointing": True})]  # fmt: skip
    cases += [Case("llama", "dp4", GRPO | {"optimizer": MUON, "lora": {"rank": 4, "alpha": 8.0}})]
    cases += [Case("qwen3", "tp2", GRPO | {"dropped": ONE_LEFT})]  # ranks without a token of the head of their own
    cases += [Case(kind, "dp2xtp2", GRPO | {"dtype": "bfloat16"}, {}, 3e-2) for kind in ("llama", "qwen3_moe")]
    check(tmp_path, cases)


@pytest.mark.gpu
@pytest.mark.parametrize(("mesh", "devices"), [("tp2", 2), ("pp2", 2), ("cp2", 2), ("dp2xtp2", 4)])
def test_over_nccl(mesh: str, devices: int, tmp_path: Path) -> None:
    """Each rank on a device of its own; float32 sums in another order than a CPU's."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"{mesh} over NCCL wants {devices} CUDA devices, one a rank; here are {torch.cuda.device_count()}")
    check(tmp_path, [Case(kind, mesh, GRPO, {}, 1e-3) for kind in ("llama", "qwen3_moe")], "cuda")
