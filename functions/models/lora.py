"""Low-rank adapters (Hu et al., arXiv:2106.09685) by peft: y = W x + (alpha / rank) B A x, W frozen, B zero at first.

Adapter tensors are float32 and bear the names of peft's files (`base_model.model.<layer>.lora_A.weight`), so that peft
and vLLM read them. peft is imported where adapters are asked for: other jobs do without it.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from functions.weights.adapters import PREFIX

ADAPTER = "default"
"""peft's name of the only adapter of a model; its files leave it out."""


def add_adapters(model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Freezes `model` and puts an adapter on every linear layer whose last name part is in `targets`.

    Raises ValueError where no layer is meant, naming those that there are.
    """
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    chosen = {name: layer for name, layer in linear.items() if name.rsplit(".", 1)[-1] in targets}
    if not chosen:
        known = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ValueError(f"lora targets {list(targets)}: the model's linear layers are {', '.join(known)}")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(chosen), init_lora_weights=False)  # type: ignore[arg-type]  # alpha may be a fraction
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)  # on the meta device: the weights come here
    for name, layer in chosen.items():
        adapted = model.get_submodule(name)
        meta = layer.weight.is_meta  # its weights come later (functions/train/sharded.py), the adapter's are made here
        device = torch.device("cpu") if meta else layer.weight.device
        adapted.get_submodule(f"lora_A.{ADAPTER}").weight = nn.Parameter(_start(name, rank, layer).to(device))
        zeros = torch.zeros(layer.out_features, rank, device=device)
        adapted.get_submodule(f"lora_B.{ADAPTER}").weight = nn.Parameter(zeros)


def _start(name: str, rank: int, layer: nn.Linear) -> Tensor:
    """A's bits follow from the layer's name alone: two trainers that start from one version start alike."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    bound = 1.0 / math.sqrt(layer.in_features)  # kaiming_uniform(a = sqrt(5)), as peft
    return torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, by the names of peft's files."""
    return {
        f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith((f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"))
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
