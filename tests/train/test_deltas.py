"""Versions of a bfloat16 policy say what they changed of the one before, whoever trained them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from functions.base.wire import Json, Version
from functions.exchange.directory import DirectoryExchange
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from functions.weights.delta import decode
from functions.weights.local_copy import LocalCopy
from functions.weights.manifest import Manifest, read_manifest
from functions.weights.materialize import materialize
from tests.support.train_call import BASE, Bench

BF16: Json = {"optimizer": {"lr": 1e-6}, "dtype": "bfloat16"}


def train(bench: Bench, params: Json, functions: Sequence[TrainFunction | None]) -> list[Json]:
    """A step by each of `functions` (None: one that holds nothing), each on the version of the one before."""
    steps = list[Json]()
    version = BASE
    for number, function in enumerate(functions):
        steps.append(bench.call(params, id=f"step-{number}", function=function, version=version))
        version = Version.from_json(steps[-1]["version"])
    return steps


def manifests(bench: Bench, steps: Sequence[Json]) -> list[Manifest]:
    return [read_manifest(bench.exchange, Version.from_json(step["version"])) for step in steps]


def overwritten(bench: Bench, old: dict[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    for ref in manifest.delta:
        for section in decode(bench.exchange.get(ref)):
            tensor = old[section.tensor].view(-1)
            values = torch.from_numpy(section.values.copy()).view(tensor.dtype)
            tensor[torch.from_numpy(section.positions)] = values
    return old


def test_each_version_leads_on_from_the_one_before(bench: Bench) -> None:
    warm = TrainFunction(device="cpu")
    steps = train(bench, BF16, [warm] * 3)
    first, second, third = manifests(bench, steps)
    assert first.delta == ()  # the model that it started from is float32
    for before, step, manifest in zip(steps, steps[1:], (second, third), strict=False):
        assert manifest.delta
        old, new = bench.weights(before), bench.weights(step)
        differing = sum(int((old[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in old)
        found = overwritten(bench, old, manifest)
        assert all(torch.equal(found[n].view(torch.int16), new[n].view(torch.int16)) for n in new)
        assert differing > 0
        assert step["stats"]["changed_weights"] == differing / sum(t.numel() for t in new.values())
        assert step["stats"]["delta_bytes"] == sum(ref.size_bytes for ref in manifest.delta)
        assert 3 * differing < step["stats"]["delta_bytes"] < manifest.size_bytes * 0.3


def test_warm_and_cold_trainers_publish_the_same_delta(bench: Bench, tmp_path: Path, directory: Path) -> None:
    other = Bench(DirectoryExchange(tmp_path / "other"), tmp_path / "s", directory, bench.samples, bench.columns)
    import_model(other.exchange, "policy", directory)
    warm = manifests(bench, train(bench, BF16, [TrainFunction(device="cpu")] * 3))
    cold = manifests(other, train(other, BF16, [None] * 3))
    assert [m.encode() for m in warm] == [m.encode() for m in cold]
    assert warm[-1].delta


@pytest.mark.parametrize(
    "params",
    [{"dtype": "float32"}, {"dtype": "bfloat16", "lora": {"rank": 2}}, {"dtype": "bfloat16", "optimizer": {"lr": 0.1}}],
    ids=["float32", "adapters", "everything changes"],
)
def test_versions_without_a_delta(bench: Bench, params: Json) -> None:
    steps = train(bench, params, [TrainFunction(device="cpu")] * 3)
    assert [m.delta for m in manifests(bench, steps)] == [()] * 3
    if params.get("optimizer"):
        assert steps[-1]["stats"]["changed_weights"] > 0.5
        assert steps[-1]["stats"]["delta_bytes"] == 0
    else:
        assert "changed_weights" not in steps[-1]["stats"]


def test_a_copy_follows_a_trainer_and_a_critic(bench: Bench, tmp_path: Path) -> None:
    """Through the files that the engines load, tied head and all."""
    critic: Json = BF16 | {"objective": "value", "advantage": "gae", "model": "policy"}
    for name, params in (("policy", BF16), ("critic", critic)):
        steps = [Version.from_json(s["version"]) for s in train(bench, params, [TrainFunction(device="cpu")] * 3)]
        copy, context = LocalCopy(tmp_path / name), bench.context()
        for number, version in enumerate(steps):
            directory = copy.bring(bench.exchange, version, context.phase).directory
            whole = materialize(bench.exchange, version, tmp_path / "whole" / name / str(number))
            file = "model.safetensors"
            assert (directory / file).read_bytes() == (whole / file).read_bytes()
        assert [span.name for span in context.meter.spans if span.name.startswith("fetch")] == [
            "fetch", "fetch", "fetch delta", "fetch", "fetch delta",
        ]  # fmt: skip
