"""The forward pass as one module that a mesh shards (FSDP2 over dp, and within a layer
functions/models/tensor_parallel.py), and each rank's share of the packs.

    rank r   all-gather a layer -> forward -> ... -> backward -> reduce-scatter (sum)         for each of its packs
A pack's loss is divided by the totals of the whole batch (step.py), so gradients are added over ranks, not averaged:
N ranks make the update of one, up to the order of additions. Packs are dealt over dp. Ranks go through their packs in
step; one that has fewer makes idle passes (one token, no loss), because every pass is a collective.

FSDP2: torch.distributed.fsdp.fully_shard (arXiv:2304.11277 describes its forerunner); ZeRO stage 3 (arXiv:1910.02054).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from functions.algorithms.truncation import WHOLE, Truncation
from functions.models.context_parallel import share_tokens
from functions.models.forward import Head, all_states, pack_logprobs, pack_values
from functions.models.packing import Pack
from functions.models.pretrained import backbone, lm_head
from functions.models.tensor_parallel import TokenShare, split_layers
from functions.train.pipeline import Passes, Stage, execute, forwards, one_f_one_b

PACKS_PER_RANK = 2
"""Packs are made small enough that each rank gets about so many: their loads can then be balanced; of a pipeline each
rank of each stage, so that there is something to fill it with."""


class Forward(nn.Module):
    """What the objective needs of a pack: log-probabilities and entropy, or the critic's values. One module, so that
    the output head, which is used beside its own forward, is gathered with the rest."""

    def __init__(self, model: PreTrainedModel, head: Head | None) -> None:
        super().__init__()
        self.model = model
        self.shared: DeviceMesh | None = None
        """The ranks that share the layers (tp), or a pack's tokens (cp)."""
        self.stage: Stage | None = None
        """Of a pipeline."""
        self.policy = head is not None
        self._softcap, self._scale = (None, 1.0) if head is None else (head.softcap, head.scale)

    def forward(
        self, pack: Pack, temperature: float, truncation: Truncation = WHOLE, inputs: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, ...]:
        """(logprobs, entropy, kept mass, `more`) of a policy (pack_logprobs), (values,) of a critic; each [N].

        Of a pipeline's stage from the states `inputs` of the one before; but for the last one (its states [B, T, H],).
        """
        if self.stage is not None and not self.stage.last:
            return (all_states(self.model, pack, inputs),)
        if self.shared is not None:
            tokens = TokenShare.of(pack, self.shared)
            own = self._outputs(tokens.pack(pack), temperature, truncation, inputs=inputs, **tokens.options(more))
            return tokens.gather(own)
        return self._outputs(pack, temperature, truncation, inputs=inputs, **more)

    def _outputs(
        self, pack: Pack, temperature: float, truncation: Truncation, inputs: Tensor | None, **more: Any
    ) -> tuple[Tensor, ...]:
        if not self.policy:
            return (pack_values(self.model, pack, inputs).clone(),)  # FSDP2 hooks on to outputs, which may be no views
        layer = lm_head(self.model)
        head = Head(layer.weight, layer.bias, self._softcap, self._scale)
        return pack_logprobs(self.model, head, pack, temperature, truncation, inputs=inputs, **more)


def shard(forward: Forward, mesh: DeviceMesh) -> None:
    """Each parameter to 1/N on every rank of `mesh` (gang.py), one unit per transformer layer and one for the rest.

    With tp a layer's parameters are divided over tp first, then over dp; those of embedding and head over both at once.
    """
    dp = mesh["dp"]
    if mesh["cp"].size() > 1:
        forward.shared, dp = mesh["cp"], mesh["dp", "cp"]._flatten("dp_cp")
        share_tokens(forward.model, mesh["cp"])
    rest = dp
    unit_names = set(forward.model._no_split_modules or ())
    layers = [
        layer
        for parent in forward.model.modules()
        if isinstance(parent, nn.ModuleList)
        for layer in parent
        if type(layer).__name__ in unit_names
    ]
    if mesh["tp"].size() > 1:
        forward.shared, rest = mesh["tp"], mesh["dp", "cp", "tp"]._flatten("dp_cp_tp")
        split_layers(forward.model, mesh["tp"], last=forward.stage is None or forward.stage.last)
        ends = {forward.model.get_input_embeddings(), forward.model.get_output_embeddings()}
        parts = [part for part in backbone(forward.model).children() if part not in ends]
        layers += [part for part in parts if any(True for _ in part.parameters(recurse=False))]  # the last norm
    for layer in layers:
        fully_shard(layer, mesh=dp)
    fully_shard(forward, mesh=rest)
    for unit in forward.modules():
        if isinstance(unit, FSDPModule):  # a sum: the losses are shares already (gloo knows no scaled sum)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` where and as `like` is: of a sharded one `tensor` is the rank's own rows (parts.py)."""
    own = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The whole tensors on the CPU, gathered one by one by all ranks together; {} on ranks that do not `keep`."""
    result = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        if keep:
            result[name] = full.detach()
    return result


def full_scalar(value: Tensor) -> Tensor:
    """A reduction over sharded tensors, reduced over ranks as well."""
    return value.full_tensor() if isinstance(value, DTensor) else value


# ---- packs


@dataclass(frozen=True)
class Share:
    """The packs of one rank."""

    packs: tuple[Pack, ...]
    idle: int
    """Passes that the other ranks make beyond these."""
    count: int
    """Packs of all ranks,"""
    tokens: int
    """and what they compute."""

    @property
    def passes(self) -> list[Pack]:
        """All that this rank computes."""
        return [*self.packs, *(idle_pack() for _ in range(self.idle))]


def share(packs_of: Callable[[int], list[Pack]], budget_tokens: int, rank: int, size: int, stages: int = 1) -> Share:
    """Rank's share of the packs that `packs_of(budget)` makes: heaviest first, each to the rank with the least so far.

    The same on every rank, as it depends on the samples alone.
    """
    packs = packs_of(budget_tokens)
    if size * stages > 1:
        fair = -(-sum(pack.tokens.numel() for pack in packs) // (size * stages * PACKS_PER_RANK))
        packs = packs_of(min(budget_tokens, fair))
    loads = [0] * size
    shares: list[list[Pack]] = [[] for _ in range(size)]
    heaviest: Sequence[Pack] = packs if size == 1 else sorted(packs, key=lambda pack: -pack.tokens.numel())
    for pack in heaviest:
        least = loads.index(min(loads))
        shares[least].append(pack)
        loads[least] += pack.tokens.numel()
    idle = max(map(len, shares)) - len(shares[rank])
    return Share(tuple(shares[rank]), idle, len(packs), sum(loads))


def idle_pack() -> Pack:
    """One token, of no sample."""
    zero = torch.zeros(1, dtype=torch.int64)
    return Pack(
        rows=(), tokens=zero[None], positions=zero[None], prefixes=None, predicts=zero, targets=zero, flat=zero,
        segment=zero,
    )  # fmt: skip


def run(
    forward: Forward, packs: Sequence[Pack], one: Callable[[int, Tensor | None], Tensor], *, backward: bool = True
) -> None:
    """`one` (Passes.one) for each of the packs; through the stages of a pipeline where there are some."""
    if forward.stage is not None:
        stages, count = len(forward.stage.ranks), len(packs)
        execute([passes(forward, packs, one)], one_f_one_b(stages, count) if backward else forwards(stages, count))
        return
    for number in range(len(packs)):
        output = one(number, None)
        if backward:
            output.backward()  # type: ignore[no-untyped-call]


def passes(forward: Forward, packs: Sequence[Pack], one: Callable[[int, Tensor | None], Tensor]) -> Passes:
    assert forward.stage is not None, "of a pipeline"
    model = forward.model
    shapes = [(*pack.tokens.shape, model.config.hidden_size) for pack in packs]
    return Passes(forward.stage, shapes, model.dtype, model.device, one)
