"""Pipeline parallelism: each rank holds a stage, some consecutive layers of the model, and works through its own order.

    embedding, layers  -- states [B, T, H] -->  layers  -->  ...  -->  layers, norm, head, loss        forward
                       <-- their gradients --           <--       <--                                  backward
Orders are data: of each rank the (model, micro-batch, forward | backward) one after the other, 1F1B's of one model
(Narayanan et al., arXiv:2104.04473, section 2.2) or those of two in each other's bubbles (schedules.py). A micro-batch
is a pack, of any length. What a rank is sent, and in which order, it reads in its neighbours' orders, so that nothing
but tensors is sent. (torch.distributed.pipelining: see docs/decisions/0031-pipelines.md.)
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from functions.models.pretrained import backbone

SPLIT_POINTS = ["embed_tokens", "layers", "norm"]
"""Of a backbone that can be cut: what its architecture's `base_model_pp_plan` names, in order."""


@dataclass(frozen=True)
class Stage:
    """What a rank holds of a model."""

    mesh: DeviceMesh
    """Of AXES (functions/call/parallel.py)."""
    tied: str | None
    """The embedding that is the output head too: first and last stage hold it, and add up its gradient."""

    @property
    def place(self) -> int:
        return (self.mesh.get_coordinate() or (0,))[0]

    @property
    def ranks(self) -> list[int]:
        """That have the stages, in their order."""
        _, dp, cp, tp = self.mesh.get_coordinate() or (0, 0, 0, 0)
        column: list[int] = self.mesh.mesh[:, dp, cp, tp].tolist()
        return column

    @property
    def first(self) -> bool:
        return self.place == 0

    @property
    def last(self) -> bool:
        return self.place == self.mesh.size(0) - 1

    @property
    def copied(self) -> str | None:
        """What an earlier stage holds as well: it is written, and counted in norms, there."""
        return self.tied if self.last else None

    def add_tied(self, named: Mapping[str, nn.Parameter]) -> None:
        """Both holders' gradients of a trained tied embedding become their sum."""
        parameter = named.get(self.tied or "")
        if parameter is None or not (self.first or self.last):
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        theirs, peer = torch.empty_like(own), self.ranks[-1 if self.first else 0]
        swap = [dist.P2POp(dist.isend, own.contiguous(), peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        own.add_(theirs)

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Of all stages' gradients, from each one's."""
        square = norm.double().square()
        dist.all_reduce(square, group=self.mesh.get_group("pp"))
        return square.sqrt().to(norm.dtype)


class _Skipped(nn.Module):
    """A layer of another stage."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


def cut(model: PreTrainedModel, mesh: DeviceMesh) -> Stage | None:
    """Leaves of `model` this rank's stage, under the same names; None where there is one stage alone.

    ValueError for a model that has no split points, or fewer layers than there are stages.
    """
    count = mesh.size(0)
    if count == 1:
        return None
    inner, config = backbone(model), model.config
    if list(getattr(config, "base_model_pp_plan", None) or ()) != SPLIT_POINTS:
        raise ValueError(f"{type(model).__name__} has no split points: it is not divided by pp")
    layers = inner.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    if len(layers) < count:
        raise ValueError(f"{type(model).__name__} has {len(layers)} layers: they are not divided into {count} stages")
    stage = Stage(mesh, next(iter((getattr(model, "all_tied_weights_keys", None) or {}).values()), None))
    low, high = (len(layers) * place // count for place in (stage.place, stage.place + 1))
    for number in {*range(len(layers))} - {*range(low, high)}:
        layers[number] = _Skipped()
    if not stage.first:
        if stage.copied is None:
            inner.embed_tokens = nn.Identity()
        if hasattr(inner, "embedding_multiplier"):  # Granite's, of what is given as embeddings
            vars(inner)["embedding_multiplier"] = 1.0
    if not stage.last:
        inner.norm = nn.Identity()
        for name, child in model.named_children():
            if child is not inner:
                setattr(model, name, nn.Identity())
    return stage


# ---- execution


class Item(NamedTuple):
    """One micro-batch of one model through a rank's stage; of a message, what it comes from."""

    model: int
    micro_batch: int
    backward: bool


@dataclass(frozen=True)
class Passes:
    """The micro-batches of a model."""

    stage: Stage
    shapes: Sequence[Sequence[int]]
    """Of the states of each,"""
    dtype: torch.dtype
    device: torch.device
    one: Callable[[int, Tensor | None], Tensor]
    """Micro-batch's number and the states that the stage before sends -> the states to be sent on; of the last stage
    the loss."""


def one_f_one_b(stages: int, micro_batches: int, *, model: int = 0) -> list[list[Item]]:
    """The order of each stage; no more than stages - place micro-batches are held there."""
    found = []
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        order = [Item(model, number, False) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(Item(model, number, True))
            order += [Item(model, number + ahead, False)] if number + ahead < micro_batches else []
        found.append(order)
    return found


def forwards(stages: int, micro_batches: int) -> list[list[Item]]:
    return [[Item(0, number, False) for number in range(micro_batches)]] * stages


def execute(models: Sequence[Passes], orders: Sequence[Sequence[Item]]) -> int:
    """This rank's part of `orders`, which go by the stages of the first model; the most micro-batches that it held.

    Without gradients enabled nothing is held.
    """
    mail, held, most = _Mail(models, orders), dict[tuple[int, int], tuple[Tensor | None, Tensor]](), 0
    for item in orders[models[0].stage.place]:
        passes = models[item.model]
        stage, own = passes.stage, (item.model, item.micro_batch)
        if item.backward:
            inputs, output = held.pop(own)
            gradient = None if stage.last else mail.take(item)
            torch.autograd.backward(output, gradient)
            if inputs is not None:
                assert inputs.grad is not None
                mail.send(item, inputs.grad)
        else:
            inputs = None if stage.first else mail.take(item)
            if inputs is not None and torch.is_grad_enabled():
                inputs.requires_grad_()
            output = passes.one(item.micro_batch, inputs)
            if torch.is_grad_enabled():
                held[own] = inputs, output
                most = max(most, len(held))
            if not stage.last:
                mail.send(item, output.detach())
    mail.close()
    return most


class _Mail:
    """What this rank sends to its neighbours and is sent by them. Receives are posted in the order of the sends, one
    ahead of the one that is waited for; each direction has a group of its own, as NCCL serves a group in turn."""

    def __init__(self, models: Sequence[Passes], orders: Sequence[Sequence[Item]]) -> None:
        self._models, self._line = models, models[0].stage.ranks
        self._me, self._down = models[0].stage.place, models[0].stage.mesh.get_group("pp")
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: dict[Item, tuple[dist.Work, Tensor]] = {}
        peers = [peer for peer in (self._me - 1, self._me + 1) if 0 <= peer < len(orders)]
        self._coming = {peer: self._incoming(orders[peer], peer) for peer in peers}
        for peer in self._coming:
            self._post(peer)

    def _incoming(self, order: Sequence[Item], peer: int) -> Iterator[Item]:
        return (item for item in order if self._target(item, peer) == self._me)

    def _target(self, item: Item, sender: int) -> int | None:
        """Who gets what `sender` makes of `item`, by their places in the line; None: nobody."""
        ranks = self._models[item.model].stage.ranks
        to = ranks.index(self._line[sender]) + (-1 if item.backward else 1)
        return self._line.index(ranks[to]) if 0 <= to < len(ranks) else None

    def _post(self, peer: int) -> None:
        for item in self._coming[peer]:
            passes = self._models[item.model]
            buffer = torch.empty(tuple(passes.shapes[item.micro_batch]), dtype=passes.dtype, device=passes.device)
            group = self._down if peer > self._me else None
            self._posted[item] = _started(dist.irecv(buffer, self._line[peer], group=group)), buffer
            return

    def take(self, item: Item) -> Tensor:
        """What this rank's `item` is computed from."""
        ranks = self._models[item.model].stage.ranks
        source = ranks[ranks.index(self._line[self._me]) + (1 if item.backward else -1)]
        peer = self._line.index(source)
        while item not in self._posted:
            self._post(peer)
        self._post(peer)
        work, buffer = self._posted.pop(item)
        work.wait()
        return buffer

    def send(self, item: Item, tensor: Tensor) -> None:
        to = self._target(item, self._me)
        assert to is not None
        tensor = tensor.contiguous()
        group = self._down if to < self._me else None
        self._sent.append((_started(dist.isend(tensor, self._line[to], group=group)), tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def close(self) -> None:
        for work, _ in self._sent:
            work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is of the group"
    return work
