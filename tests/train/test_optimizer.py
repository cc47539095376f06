"""The optimizer by itself: against torch's own on plain tensors, through its state, on the host and off it."""

import pytest
import torch
from torch import Tensor, nn

from functions.base.wire import Json, Version
from functions.call.function import FatalError
from functions.call.train_params import OptimizerParams
from functions.train.optimizer import Optimizer
from tests.support.train_call import ADAM, Bench

SHAPES = {
    "model.embed_tokens.weight": (13, 6), "model.layers.0.mlp.up_proj.weight": (9, 6), "lm_head.weight": (13, 6),
    "model.layers.10.mlp.down_proj.weight": (6, 9), "model.layers.0.norm.weight": (6,),
    "model.layers.0.mlp.experts.down_proj": (3, 6, 4),
}  # fmt: skip
HIDDEN = [name for name in SHAPES if "mlp" in name]


@pytest.mark.parametrize("offload", [False, True])
def test_three_steps_of_muon_are_torchs(offload: bool) -> None:
    """torch.optim.Muon has the layers' matrices, each expert's by itself; AdamW the rest, vectors without decay. What
    goes from step to step is the state that a version has."""
    params = OptimizerParams(
        optimizer="muon", optimizer_offload=offload, lr=1e-2, weight_decay=0.1, max_grad_norm=None, eps=1e-3
    )
    torch.manual_seed(0)
    start = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    ours = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    plain = {
        (name, number): nn.Parameter(one.clone())
        for name, tensor in start.items()
        for number, one in enumerate(tensor if tensor.ndim == 3 else [tensor])
    }
    muon = torch.optim.Muon(
        [p for (name, _), p in plain.items() if name in HIDDEN], lr=1e-2, weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    rest = [p for (name, _), p in plain.items() if name not in HIDDEN]
    adam = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in rest], lr=1e-2, eps=1e-3
    )
    state: dict[str, Tensor] = {}
    for step in range(3):
        optimizer = Optimizer(ours, state, step, params)
        for name, parameter in ours.items():
            parameter.grad = torch.randn(SHAPES[name])
            for number, own in enumerate(parameter.grad if parameter.ndim == 3 else [parameter.grad]):
                plain[name, number].grad = own.clone()
        optimizer.step(params, torch.zeros(()))
        muon.step()  # type: ignore[no-untyped-call]
        adam.step()
        state = {name: tensor.clone() for name, tensor in optimizer.state()}
        for (name, number), parameter in plain.items():
            got = ours[name][number] if ours[name].ndim == 3 else ours[name]
            torch.testing.assert_close(got, parameter, rtol=0, atol=1e-6)
    hidden = {f"momentum_buffer/{name}" for name in HIDDEN}
    others = {f"{moment}/{name}" for name in SHAPES if name not in HIDDEN for moment in ("exp_avg", "exp_avg_sq")}
    assert state.keys() == hidden | others


def test_state_on_the_host_changes_nothing(bench: Bench) -> None:
    """Two steps; the second from the first's state, and by the replica that made it, to the bit."""
    found = []
    for offload in (False, True):
        params: Json = {"optimizer": ADAM | {"optimizer_offload": offload}}
        first = bench.call(params, id=f"first-{offload}")
        second = bench.call(params, id=f"second-{offload}", version=Version.from_json(first["version"]))
        found.append(bench.weights(second) | bench.state(second))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_state_of_another_optimizer_is_refused(bench: Bench) -> None:
    version = Version.from_json(bench.call({"optimizer": ADAM})["version"])
    with pytest.raises(FatalError, match=r"its optimizer state lacks 'momentum_buffer/.*', which 'muon' wants"):
        bench.call({"optimizer": ADAM | {"optimizer": "muon"}}, id="other", version=version)


def test_adapters_train_by_muon(bench: Bench) -> None:
    """All that trains are matrices of layers: AdamW has nothing."""
    data = bench.call({"optimizer": ADAM | {"optimizer": "muon"}, "lora": {"rank": 2}})
    assert {name.partition("/")[0] for name in bench.state(data)} == {"momentum_buffer"}
    moved = [float(t.abs().max()) for name, t in bench.weights(data).items() if "lora_B" in name]
    assert min(moved) > 0
