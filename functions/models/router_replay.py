"""Routing replay: in training a token goes through the experts that it went through in the rollout.

    engine    router: softmax over its logits -> the k most probable experts          kept, a token at a time
    trainer   router: softmax over its own logits -> weights of *those* experts       gradients as ever
"R3" of arXiv:2510.11370 (verl: `actor.router_replay.mode`): two forward passes that differ in their last bits choose
other experts where the k-th and the next are close, and the log-probability of a token then differs by much more.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from functions.base.names import REPLAYED
from functions.base.samples import unrouted
from functions.models.pretrained import backbone


def routers(model: PreTrainedModel) -> dict[int, tuple[nn.Module, Any]]:
    """By its number each layer that has a router, and that. ValueError where there is none whose form is known."""
    if model.config.model_type not in REPLAYED:
        raise ValueError(f"{type(model).__name__} has no routers that are known here: its experts are not replayed")
    layers = enumerate(backbone(model).get_submodule("layers").children())
    return {n: (layer, gate) for n, layer in layers if (gate := getattr(getattr(layer, "mlp", None), "gate", None))}


class Recorder:
    """What each router of a model chooses, from here on."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._none = np.zeros((0, config.num_hidden_layers, config.num_experts_per_tok),
                              np.min_scalar_type(config.num_experts))  # fmt: skip
        self._chosen: dict[int, Tensor] = {}
        for number, (_, router) in routers(model).items():
            router.register_forward_hook(partial(self._keep, number))

    def _keep(self, number: int, _: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
        self._chosen[number] = output[2]

    def last(self, rows: int) -> npt.NDArray[Any]:
        """[rows, layers, k]: of the last token of each row of the latest pass."""
        found = unrouted(self._none, rows)
        for number, chosen in self._chosen.items():
            found[:, number] = chosen.view(rows, -1, chosen.shape[-1])[:, -1].cpu().numpy()
        return found

    def whole(self, before: npt.NDArray[Any] | None, tokens: int, drawn: Sequence[Any]) -> npt.NDArray[Any]:
        """Of a response: of its first `tokens`, which were given, what came with them, and of those drawn since."""
        given = unrouted(self._none, tokens) if before is None else before[:tokens]
        return np.concatenate((given, np.array(drawn, given.dtype).reshape(-1, *given.shape[1:])))


def replay(model: PreTrainedModel) -> None:
    """Has the routers of a model, which may be a stage of one, take the `experts` that its backbone is called with
    (Pack). They reach a layer with its call, so that a pass that is made again in backward takes them again."""
    for number, (layer, router) in routers(model).items():
        if not hasattr(router, "given"):
            router.given = None
            layer.register_forward_pre_hook(partial(_give, number, router), with_kwargs=True)
            router.register_forward_hook(_take)


def _give(number: int, router: Any, _: nn.Module, __: Any, given: dict[str, Any]) -> None:
    experts = given.get("experts")
    router.given = None if experts is None else experts[:, :, number].flatten(0, 1).long()


def _take(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    if router.given is None:
        return output
    logits, _weights, own = output
    chosen = torch.where(router.given < 0, own, router.given)
    weights = torch.softmax(logits, -1, dtype=torch.float).gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen
