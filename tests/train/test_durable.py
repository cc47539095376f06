"""The optimizer's state on the node that trained alone: the same bits there, and a loss that is told by its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from functions.base.wire import Json, Version, on_a_node
from functions.call.meter import Meter
from functions.exchange.base import Corrupt, NotFound
from functions.exchange.node import NodeExchange
from functions.server.attempt import OwnFolder
from functions.train.function import TrainFunction
from functions.weights.manifest import read_manifest
from tests.support.train_call import ADAM, BASE, Bench, same_bits

LORA: Json = {"lora": {"rank": 4, "alpha": 8}}


def on(bench: Bench, node: Path) -> Bench:
    """The same on a node with a tier: another process of it each time."""
    return with_tier(bench, NodeExchange(bench.exchange, node, 1 << 30))


def with_tier(bench: Bench, node: NodeExchange) -> Bench:
    return dataclasses.replace(bench, exchange=OwnFolder(node, "", "", Meter()), node=node)


@pytest.mark.parametrize("variant", [{}, {"dtype": "bfloat16"}, LORA], ids=["float32", "bfloat16", "lora"])
def test_steps_whose_state_the_node_holds_are_those_whose_state_lies_in_the_store(
    bench: Bench, tmp_path: Path, variant: Json
) -> None:
    ends: dict[bool, tuple[Bench, Json]] = {}
    for durable in (True, False):
        node, version, told = on(bench, tmp_path / str(durable)), BASE, Json()
        for step in (1, 2, 3):  # a process of its own each time: nothing is held in memory
            params = {"optimizer": ADAM, **variant, "durable_state": durable or step == 3}
            told = node.call(params, id=f"{durable}-{step}", version=version, function=TrainFunction(device="cpu"))
            version = Version.from_json(told["version"])
            state = read_manifest(node.exchange, version).state
            assert told["durable"] == (durable or step == 3)
            assert {on_a_node(piece.key) for entry in state for piece in entry.pieces} == {not told["durable"]}
        ends[durable] = (node, told)
    same_bits(*(node.weights(told) for node, told in ends.values()))
    same_bits(*(node.state(told) for node, told in ends.values()))


def test_another_node_has_the_weights_and_says_what_it_lacks(bench: Bench, tmp_path: Path) -> None:
    params: Json = {"optimizer": ADAM, "durable_state": False}
    made = on(bench, tmp_path / "one").call(params)
    another = on(bench, tmp_path / "another")
    assert another.weights(made)
    with pytest.raises(Corrupt) as caught:
        another.call(params, id="next", version=Version.from_json(made["version"]))
    lost = caught.value.__cause__
    assert isinstance(lost, NotFound)
    assert on_a_node(lost.key)


def test_without_room_on_the_node_or_without_a_tier_the_store_has_it(bench: Bench, tmp_path: Path) -> None:
    small = NodeExchange(bench.exchange, tmp_path / "small", 1000)
    params: Json = {"optimizer": ADAM, "durable_state": False}
    for name, one in (("small", with_tier(bench, small)), ("none", bench)):
        made = one.call(params, id=name)
        assert made["durable"]
        assert bench.state(made)
