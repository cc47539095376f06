"""Context parallelism: each rank of a mesh's cp axis has some tokens of every pack, and in attention some heads of all.

    tokens of a pack | rank 0 | rank 1 |   embedding, norms, projections, MLP, experts: each rank its own tokens
    attention        all tokens, heads divided: one all-to-all before it, one after
DeepSpeed-Ulysses, arXiv:2309.14509 (verl's `ulysses_sequence_parallel_size`). Attention itself is as on one rank, so
that prompts that samples share stay shared. (torch's own ring attention: docs/decisions/0043-more-of-a-mesh.md.)
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import pad
from transformers import PreTrainedModel

from functions.models.pretrained import backbone


@dataclass(frozen=True)
class Tokens:
    """A pack's tokens over the ranks of `mesh`: as many on each, the last ones with padding."""

    mesh: DeviceMesh
    count: int
    """Of the pack."""

    @property
    def each(self) -> int:
        return -(-self.count // self.mesh.size())

    def own(self, whole: Tensor) -> Tensor:
        """This rank's [B, each, ...] of [B, count, ...]."""
        padded = pad(whole, (0, 0) * (whole.ndim - 2) + (0, self.each * self.mesh.size() - self.count))
        return padded.narrow(1, self.each * self.mesh.get_local_rank(), self.each)

    def to_heads(self, states: Tensor) -> Tensor:
        """[B, heads / ranks, count, D] of [B, heads, each, D]."""
        return self._moved(states, 2, 1)[:, :, : self.count]

    def from_heads(self, states: Tensor) -> Tensor:
        """[B, each, heads, D] of [B, count, heads / ranks, D]."""
        padded = pad(states, (0, 0, 0, 0, 0, self.each * self.mesh.size() - self.count))
        return self._moved(padded, 2, 1)

    def gather(self, states: Tensor) -> Tensor:
        """[B, count, H] on every rank, of [B, each, H]; each rank's gradient is a part of it."""
        whole = DTensor.from_local(states, self.mesh, [Shard(1)], run_check=False)
        return whole.full_tensor(grad_placements=[Partial()])[:, : self.count]

    def _moved(self, states: Tensor, have: int, want: int) -> Tensor:
        held = DTensor.from_local(states.contiguous(), self.mesh, [Shard(have)], run_check=False)
        return held.redistribute(placements=[Shard(want)]).to_local()


def share_tokens(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Has the ranks of `mesh` each compute their tokens of what the backbone is given; all get all states."""

    def enter(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = Tokens(mesh, given["input_ids"].shape[1])
        own = {name: tokens.own(given[name]) for name in ("input_ids", "position_ids", "experts") if name in given}
        return args, given | own | {"tokens": tokens}

    def leave(_: Any, __: Any, given: dict[str, Any], output: Any) -> Any:
        output.last_hidden_state = given["tokens"].gather(output.last_hidden_state)
        return output

    inner = backbone(model)
    inner.register_forward_pre_hook(enter, with_kwargs=True)
    inner.register_forward_hook(leave, with_kwargs=True)
