"""AdamW with warm-up, schedule and clipping; its state as named tensors that a version carries.

    lr(step) = lr * (step + 1) / warmup_steps                                   step < warmup_steps
             = lr * (ratio + (1 - ratio) * f(progress)),   f = 1 | 1 - x | (1 + cos(pi x)) / 2 by schedule
with progress = (step - warmup) / (total - warmup) in [0, 1] and ratio = min_lr_ratio; `step` counts from 0.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from functions.call.train_params import OptimizerParams
from functions.train.parallel import full_scalar, placed

T = TypeVar("T", bound=Tensor)
MASTER = "master/"
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """AdamW over named parameters. `steps` counts the updates made, over all versions of the model."""

    def __init__(self, named: Mapping[str, nn.Parameter], state: Mapping[str, Tensor], steps: int) -> None:
        """`state`: what `state()` gave earlier ({} at the start). KeyError where it lacks a parameter's moments."""
        self.named, self.steps = dict(named), steps
        matrices = [p for p in self.named.values() if p.ndim >= 2]
        others = [p for p in self.named.values() if p.ndim < 2]
        groups = [{"params": alike, "decays": True} for alike in _alike(matrices)]
        groups += [{"params": alike, "decays": False} for alike in _alike(others)]
        self._adam = torch.optim.AdamW(groups, lr=0.0, fused=True)
        for name, parameter in self.named.items() if steps else ():
            own = {moment: placed(state[f"{moment}/{name}"], parameter) for moment in _MOMENTS}
            own["step"] = torch.tensor(float(steps), device=parameter.device)
            self._adam.state[parameter] = own

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter name; `steps` is the caller's to keep."""
        return {
            f"{moment}/{name}": self._adam.state[parameter][moment]
            for name, parameter in self.named.items()
            for moment in _MOMENTS
            if parameter in self._adam.state
        }

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds beside the parameters."""
        return (t for own in self._adam.state.values() for t in own.values() if isinstance(t, Tensor))

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

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

    def step(self, params: OptimizerParams, norm: Tensor) -> float:
        """Clips by `norm` (of `grad_norm`) and updates; the learning rate that was used."""
        if params.max_grad_norm is not None:
            for alike in _alike(self.named.values()):
                torch.nn.utils.clip_grads_with_norm_(alike, params.max_grad_norm, norm)
        lr = learning_rate(params, self.steps)
        for group in self._adam.param_groups:
            group["lr"], group["betas"], group["eps"] = lr, params.betas, params.eps
            group["weight_decay"] = params.weight_decay if group["decays"] else 0.0
        for parameter in self.named.values():
            if parameter.grad is None:  # every parameter has moments after the first step, whatever the batch was
                parameter.grad = torch.zeros_like(parameter)
        self.steps += 1  # before: what fails within is of neither step
        self._adam.step()
        return lr


def _alike(tensors: Iterable[T]) -> list[list[T]]:
    """In groups that one fused operation takes: of one mesh, and placed alike."""
    groups = dict[object, list[T]]()
    for tensor in tensors:
        place = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(place, []).append(tensor)
    return list(groups.values())
