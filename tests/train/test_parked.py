"""A trainer that parks between its steps: the same bits as one that does not, and none of them in private memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from functions.base.wire import Json, Version
from functions.models.parked import give_back
from functions.train.function import TrainFunction
from functions.train.state import tensors_of
from functions.weights.base import import_model
from tests.support.processes import mapping, private_mb
from tests.support.train_call import ADAM, BASE, Bench, same_bits, save_tiny


@pytest.mark.parametrize(
    "variant",
    [{}, {"dtype": "bfloat16"}, {"lora": {"rank": 4, "alpha": 8}}],
    ids=["float32", "bfloat16 with deltas", "lora"],
)
def test_steps_of_a_trainer_that_parks_are_those_of_one_that_does_not(bench: Bench, variant: Json) -> None:
    params = {"optimizer": ADAM, **variant}
    steady, parking = TrainFunction(device="cpu"), TrainFunction(device="cpu")
    versions = {steady: BASE, parking: BASE}
    for step in range(3):
        told = {}
        for function, name in ((steady, "steady"), (parking, "parking")):
            told[name] = bench.call(params, id=f"{name}-{step}", version=versions[function], function=function)
            versions[function] = Version.from_json(told[name]["version"])
        assert told["parking"]["metrics"] == told["steady"]["metrics"]
        assert told["parking"]["stats"] == told["steady"]["stats"]
        assert parking.park() == step + 1
        parking.unpark()
    same_bits(bench.weights(told["parking"]), bench.weights(told["steady"]))
    same_bits(bench.state(told["parking"]), bench.state(told["steady"]))


def test_a_parked_trainer_has_nothing_in_private_memory(bench: Bench, tmp_path: Path) -> None:
    save_tiny(tmp_path / "large", intermediate_size=8_192)
    base = import_model(bench.exchange, "large", tmp_path / "large")
    size_mb = (tmp_path / "large" / "model.safetensors").stat().st_size / 2**20
    params = {"optimizer": ADAM, "model": "large", "dtype": "bfloat16"}
    bench.call(params, id="warm-up", version=base)
    gc.collect()
    give_back()
    empty, function, version = private_mb(), TrainFunction(device="cpu"), base
    for name in ("c", "d"):  # the second step with gradients of the first, and tensors that are mapped already
        made = bench.call(params, id=name, version=version, function=function)
        version = Version.from_json(made["version"])
        held = private_mb() - empty
        assert function.park() == version.number
        gc.collect()
        assert held - (private_mb() - empty) > 3 * size_mb, "two moments, what was published, gradients"
        assert function._held is not None
        assert {mapping(t.data_ptr()) for t in tensors_of(function._held)} == {"/memfd:parked (deleted)"}
        function.unpark()


def test_a_trainer_that_holds_nothing_parks() -> None:
    function = TrainFunction(device="cpu")
    assert function.park() is None
    function.unpark()
