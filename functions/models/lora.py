"""Low-rank adapters (Hu et al., arXiv:2106.09685): y = W x + (alpha / rank) B A x, W frozen, B zero at first.

Adapter tensors bear peft's names (`base_model.model.<layer>.lora_A.weight`), so that peft and vLLM read them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from functions.weights.adapters import PREFIX


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter beside it. A [rank, in] and B [out, rank] are float32."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, name: str) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        meta = base.weight.is_meta  # its weights come later (functions/train/sharded.py), the adapter's are made here
        device = torch.device("cpu") if meta else base.weight.device
        # A's bits follow from the layer's name alone: two trainers that start from one version start alike
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        start = torch.empty(rank, base.in_features)
        bound = 1.0 / math.sqrt(base.in_features)  # kaiming_uniform(a = sqrt(5)), as peft
        start.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        self.lora_A = nn.Parameter(start.to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, states: Tensor) -> Tensor:
        plain: Tensor = self.base(states)
        low = nn.functional.linear(states.to(self.lora_A.dtype), self.lora_A)
        return plain + (nn.functional.linear(low, self.lora_B) * self.scale).to(plain.dtype)


def add_adapters(model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Freezes `model` and puts an adapter on every linear layer whose last name part is in `targets`.

    Raises ValueError where no layer is meant, naming those that there are.
    """
    model.requires_grad_(False)
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    chosen = {name: layer for name, layer in linear.items() if name.rsplit(".", 1)[-1] in targets}
    if not chosen:
        known = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ValueError(f"lora targets {list(targets)}: the model's linear layers are {', '.join(known)}")
    for name, layer in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(layer, rank, alpha, name))


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, by peft's names."""
    return {
        f"{PREFIX}{name}.{part}.weight": getattr(layer, part).detach()
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLinear)
        for part in ("lora_A", "lora_B")
    }


def load_adapters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets the adapters to `tensors`; ValueError naming one that only one side has."""
    own = adapter_tensors(model)
    different = sorted(own.keys() ^ tensors.keys())
    if different:
        raise ValueError(f"adapter {different[0]!r} is not in both the version and the model with these lora targets")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
