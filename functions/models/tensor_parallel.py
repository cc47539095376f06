"""Tensor parallelism: each rank of a mesh's tp axis has some heads, some columns of the MLP, some experts of a layer.

    layer       states of all tokens -> own heads or columns -> sum over tp -> states
    experts     states of all tokens -> own experts -> sum over tp                          whole experts
    ends        embedding, output head and score belong to all ranks alike: FSDP2 shards them over dp x tp, and each
                rank of tp does the head's work for its share of the tokens
What is divided how is the model's own plan (transformers: `base_model_tp_plan`). Megatron-LM, arXiv:1909.08053; there
the vocabulary is divided, here the tokens: every loss, truncation and metric of the head is computed as it is alone.

Weights are DTensors, layers compute on what of them is a rank's own: DTensor's operations (torch's ColwiseParallel) are
planned anew for each shape, ten milliseconds each, and every pack has a length of its own.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from functions.call.parallel import Parallel
from functions.models.packing import Pack
from functions.models.pretrained import backbone


def _place(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))


@contextmanager
def _own(module: Any, gradient: Placement | None = None) -> Iterator[None]:
    """Within, the module's parameters are this rank's parts, whose gradients are placed as they are or as `gradient`
    says."""
    named, placed = dict(module.named_parameters(recurse=False)), None if gradient is None else [gradient]
    parts = {name: p.to_local(grad_placements=placed) for name, p in named.items() if isinstance(p, DTensor)}
    module._parameters |= parts
    try:
        yield
    finally:
        module._parameters |= named


def _columns(module: Any, mesh: DeviceMesh) -> None:
    """A linear layer of which each rank has some outputs."""
    _place(module, mesh, Shard(0))

    def forward(states: Tensor) -> Tensor:
        with _own(module):
            return linear(enter(states, mesh), module.weight, module.bias)

    module.forward = forward


def _rows(module: Any, mesh: DeviceMesh) -> None:
    """A linear layer of which each rank has some inputs; its bias is added to the sum."""
    bias = module.bias
    module.bias = None
    _place(module, mesh, Shard(1))
    if bias is not None:
        module.bias = nn.Parameter(
            distribute_tensor(bias, mesh, [Replicate()], src_data_rank=None), requires_grad=bias.requires_grad
        )

    def forward(states: Tensor) -> Tensor:
        with _own(module):
            found = leave(linear(states, module.weight), mesh)
            return found if module.bias is None else found + module.bias

    module.forward = forward


def _alike(module: Any, mesh: DeviceMesh) -> None:
    """What each rank does with all weights to its own heads."""
    _place(module, mesh, Replicate())
    whole = module.forward

    def forward(states: Tensor) -> Any:
        with _own(module, Partial()):
            return whole(states)

    module.forward = forward


def _experts(module: Any, mesh: DeviceMesh) -> None:
    """Experts [E, ...] by their number. Each rank sees all tokens and what the router chose for them; those of others
    get the number beyond its last, which transformers' experts pass over."""
    _place(module, mesh, Shard(0))
    count = module.num_experts // mesh.size()
    first = count * mesh.get_local_rank()
    module.num_experts, module._is_expert_parallel = count, True
    whole = module.forward

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        own = (chosen >= first) & (chosen < first + count)
        with _own(module):
            found = whole(enter(states, mesh), torch.where(own, chosen - first, count), enter(weights, mesh))
        return leave(found, mesh)

    module.forward = forward


STYLES: Mapping[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "colwise": _columns, "rowwise": _rows, "replicated_with_grad_allreduce": _alike, "moe_tp_experts": _experts,
}  # fmt: skip
"""Of the plan's words those that are followed; an expert's own columns stay whole."""


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this rank has of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def enter(states: Tensor, mesh: DeviceMesh) -> Tensor:
    """`states` that all ranks have, on the way into what each does a part of: gradients are added up."""
    return DTensor.from_local(states, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def leave(parts: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' `parts`."""
    return DTensor.from_local(parts, mesh, [Partial()], run_check=False).full_tensor()


def split_layers(model: PreTrainedModel, mesh: DeviceMesh, *, last: bool) -> None:
    """Divides the layers over the ranks of `mesh`, the tp axis, in place; weights may be on the meta device. `last`:
    whether they end in the head, whose gradient each rank has for its tokens; of a pipeline's next stage it is whole.

    ValueError for a model that does not divide so, and for one with adapters.
    """
    adapted = any(not parameter.requires_grad for parameter in model.parameters())
    Parallel(tp=mesh.size()).check(model.config.to_dict(), lora=adapted)
    plan, inner = model.config.base_model_tp_plan or {}, backbone(model)
    for name, module in list(inner.named_modules()):
        style = STYLES.get(plan.get(re.sub(r"\.\d+", ".*", name), ""))
        if style is not None:
            style(module, mesh)
    if last:
        inner.register_forward_hook(lambda _, __, output: _entered(output, mesh))
    model.get_input_embeddings().register_forward_hook(lambda _, __, states: _own_gradient(states, mesh))


def _entered(output: Any, mesh: DeviceMesh) -> Any:
    output.last_hidden_state = enter(output.last_hidden_state, mesh)
    return output


def _own_gradient(states: Tensor, mesh: DeviceMesh) -> Tensor:
    """`states` [B, T, H], each rank's gradient that of its own tokens: they are added up over tp."""
    own = torch.arange(states.shape[1], device=states.device) % mesh.size() == mesh.get_local_rank()
    return torch.where(own[None, :, None], states, states.detach())


@dataclass(frozen=True)
class TokenShare:
    """The response tokens of a pack whose head this rank of tp computes: as many on each, the last ones more than once
    where they do not divide."""

    mesh: DeviceMesh
    index: Tensor
    count: int

    @classmethod
    def of(cls, pack: Pack, mesh: DeviceMesh) -> Self:
        count = pack.predicts.numel()
        each = -(-count // mesh.size())
        first = each * mesh.get_local_rank()
        index = torch.arange(first, first + each, device=pack.predicts.device).clamp(max=count - 1)
        return cls(mesh, index, count)

    def pack(self, pack: Pack) -> Pack:
        return replace(pack, predicts=pack.predicts[self.index], targets=pack.targets[self.index])

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What pack_logprobs is told of the tokens, of these."""
        found, history = dict(options), options.get("history")
        if history is not None:
            found["history"] = lambda row: history(int(self.index[row]))
        if "topk_ids" in options:
            found["topk_ids"] = options["topk_ids"][self.index]
        return found

    def gather(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs [each, ...] of all ranks, of the pack's tokens in their order."""
        columns = [output if output.ndim > 1 else output[:, None] for output in outputs]
        own = DTensor.from_local(torch.cat(columns, 1), self.mesh, [Shard(0)], run_check=False)
        whole = own.full_tensor(grad_placements=[Replicate()])[: self.count]
        parts = torch.split(whole, [column.shape[1] for column in columns], 1)
        found = (part if given.ndim > 1 else part[:, 0] for part, given in zip(parts, outputs, strict=True))
        return tuple(
            part.clone() if given.requires_grad else part.detach().clone()
            for part, given in zip(found, outputs, strict=True)
        )
