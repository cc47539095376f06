"""AdamW or Muon with warm-up, schedule and clipping; their state as named tensors that a version carries.

    lr(step) = lr * (step + 1) / warmup_steps                                   step < warmup_steps
             = lr * (ratio + (1 - ratio) * f(progress)),   f = 1 | 1 - x | (1 + cos(pi x)) / 2 by schedule
with progress = (step - warmup) / (total - warmup) in [0, 1] and ratio = min_lr_ratio; `step` counts from 0.

Muon (torch.optim.Muon, with the step sizes of arXiv:2502.16982 section 2.2, so that lr and weight_decay are AdamW's) is
for the matrices of numbered layers, experts one by one; embeddings, heads and vectors are AdamW's.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from functions.call.train_params import OptimizerParams
from functions.models.tensor_parallel import local
from functions.train.parallel import full_scalar, placed

MASTER = "master/"
MOMENTUM = 0.95
"""Of Muon, with Nesterov's look ahead: torch's default."""
_ADAM, _MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def learning_rate(params: OptimizerParams, step: int) -> float:
    if step < params.warmup_steps:
        return params.lr * (step + 1) / params.warmup_steps
    if params.schedule == "constant" or params.total_steps is None:
        return params.lr
    span = max(params.total_steps - params.warmup_steps, 1)
    progress = min((step - params.warmup_steps) / span, 1.0)
    shape = 1.0 - progress if params.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return params.lr * (params.min_lr_ratio + (1.0 - params.min_lr_ratio) * shape)


class Optimizer:
    """Of named parameters. `steps` counts the updates made, over all versions of the model."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], state: Mapping[str, Tensor], steps: int, params: OptimizerParams
    ) -> None:
        """`state`: what was the state earlier ({} at the start). KeyError where it lacks a parameter's moments."""
        self.named, self.steps, self._offload = dict(named), steps, params.optimizer_offload
        self._by_muon = [name for name, p in named.items() if params.optimizer == "muon" and _hidden_matrix(name, p)]
        self.rows: dict[str, Tensor] = {}
        """What this rank has of the moments, by `<moment>/<parameter>`; with optimizer_offload on the host."""
        for name, parameter in self.named.items():
            own = local(parameter)
            where = torch.device("cpu") if self._offload else own.device
            for moment in _MUON if name in self._by_muon else _ADAM:
                key = f"{moment}/{name}"
                self.rows[key] = state[key].to(where) if steps else torch.zeros_like(own, device=where)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The moments, each where and as its parameter is; none before the first step. The caller keeps `steps`."""
        found = self.rows.items() if self.steps else ()
        return ((key, placed(rows, self.named[key.partition("/")[2]])) for key, rows in found)

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that are there, by parameter name."""
        return ((name, p.grad) for name, p in self.named.items() if p.grad is not None)

    def divide_grads(self, denominator: float) -> None:
        """Gradients that were added up as sums become those of the mean."""
        for _, gradient in self.gradients():
            gradient.div_(denominator)

    def grad_norm(self, without: str | None = None) -> Tensor:
        """Global 2-norm of the gradients, on their device; a parameter without one counts as zero."""
        grads = [gradient for name, gradient in self.gradients() if name != without]
        norms = [full_scalar(torch.nn.utils.get_total_norm(alike)) for alike in _alike(grads)]
        return torch.nn.utils.get_total_norm(norms) if len(norms) > 1 else norms[0] if norms else torch.zeros(())

    @torch.no_grad()
    def step(self, params: OptimizerParams, norm: Tensor) -> float:
        """Clips by `norm` (of `grad_norm`) and updates; the learning rate that was used."""
        if params.max_grad_norm is not None:
            scale = torch.clamp(params.max_grad_norm / (norm + 1e-6), max=1.0)
            for _, gradient in self.gradients():
                local(gradient).mul_(scale)
        lr = learning_rate(params, self.steps)
        for parameter in self.named.values():
            if parameter.grad is None:  # every parameter has moments after the first step, whatever the batch was
                parameter.grad = torch.zeros_like(parameter)
        self.steps += 1  # before: what fails within is of neither step
        names = {id(p): name for name, p in self.named.items()}
        for name in self._by_muon:
            self._muon(name, self.named[name], lr, params.weight_decay)
        for decays in (True, False):
            rest = [p for name, p in self.named.items() if name not in self._by_muon and (p.ndim >= 2) == decays]
            for some in [[p] for p in rest] if self._offload else [rest]:
                self._adam({names[id(p)]: p for p in some}, lr, params.weight_decay if decays else 0.0, params)
        return lr

    def _adam(self, named: Mapping[str, nn.Parameter], lr: float, decay: float, params: OptimizerParams) -> None:
        """Of what is this rank's own: DTensor would plan each operation, element by element as it is."""
        own = {name: local(parameter) for name, parameter in named.items()}
        gradients = [local(parameter.grad) for parameter in named.values() if parameter.grad is not None]
        first, second = ([self.rows[f"{moment}/{n}"].to(p.device) for n, p in own.items()] for moment in _ADAM)
        made = [torch.tensor(self.steps - 1.0, device=parameter.device) for parameter in own.values()]
        adamw(
            [*own.values()], gradients, first, second, [], made, fused=True, amsgrad=False, beta1=params.betas[0],
            beta2=params.betas[1], lr=lr, weight_decay=decay, eps=params.eps, maximize=False,
        )  # fmt: skip
        for moment, changed in zip(_ADAM, (first, second), strict=True) if self._offload else ():
            for name, tensor in zip(named, changed, strict=True):
                self.rows[f"{moment}/{name}"].copy_(tensor)

    def _muon(self, name: str, parameter: nn.Parameter, lr: float, decay: float) -> None:
        assert parameter.grad is not None
        rows = self.rows[f"momentum_buffer/{name}"]
        momentum = placed(rows, parameter).lerp_(parameter.grad, 1 - MOMENTUM)
        update = parameter.grad.lerp(momentum, MOMENTUM)
        rows.copy_(local(momentum))
        parameter.mul_(1 - lr * decay).add_(_orthogonal(update), alpha=lr)


def _hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and re.search(r"\.\d+\.", name) is not None


def _orthogonal(update: Tensor) -> Tensor:
    """What Muon adds at a learning rate of 1 for `update`, one matrix [A, B] or several [E, A, B]. A matrix that is
    sharded is gathered, and each rank takes its own part; of several each rank has whole ones."""
    if update.ndim > 2:
        own = [_by_torch(one) for one in local(update)]
        return placed(torch.stack(own), update) if own else update
    if not isinstance(update, DTensor):
        return _by_torch(update)
    whole = _by_torch(update.full_tensor())
    everywhere = DTensor.from_local(whole, update.device_mesh, [Replicate()] * update.device_mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=update.placements)


def _by_torch(update: Tensor) -> Tensor:
    """torch.optim.Muon's step of a matrix of zeros, without momentum."""
    made = nn.Parameter(torch.zeros_like(update))
    made.grad = update
    torch.optim.Muon(
        [made], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()  # type: ignore[no-untyped-call]
    return made.detach()


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """In groups that one fused operation takes: of one mesh, and placed alike."""
    groups = dict[object, list[Tensor]]()
    for tensor in tensors:
        place = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(place, []).append(tensor)
    return list(groups.values())
