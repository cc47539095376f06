"""LoRA adapters as policy versions: a PEFT directory (adapter_config.json, adapter_model.safetensors).

`base_model_name_or_path` of adapter_config.json names the directory of the base model: relative to the adapter's own
directory, or absolute.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from functions.weights.files import decode_header, weight_files

_PREFIX = "base_model.model."
Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of a model's tensors, by name."""


@dataclass(frozen=True)
class Adapter:
    directory: Path
    base: Path
    rank: int

    def check_fits(self, base: Layout) -> None:
        """ValueError, one line, where a layer that the adapter changes is missing in the base or has other sizes.

        The product B [out, r] A [r, in] is added to a weight [out, in] (Hu et al., arXiv:2106.09685, section 4.1).
        """
        for tensor in decode_header(self.directory / "adapter_model.safetensors"):
            name = tensor.name.removeprefix(_PREFIX)
            for part, side in ((".lora_A.weight", 1), (".lora_B.weight", 0)):
                if not name.endswith(part):
                    continue
                weight = name.removesuffix(part) + ".weight"
                if weight not in base:
                    raise ValueError(f"adapter {self.directory}: its base {self.base} has no {weight}")
                if tensor.shape[side] != base[weight][1][side]:
                    raise ValueError(
                        f"adapter {self.directory} is for another base: {name} is {list(tensor.shape)}, "
                        f"{weight} of {self.base} is {list(base[weight][1])}"
                    )


def read_adapter(directory: Path) -> Adapter | None:
    """The adapter in `directory`; None where it holds a whole model. ValueError for an adapter that is not whole."""
    file = directory / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
        base, rank = Path(config["base_model_name_or_path"]), int(config["r"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"adapter {directory}: adapter_config.json wants base_model_name_or_path and r") from error
    if not (directory / "adapter_model.safetensors").is_file():
        raise ValueError(f"adapter {directory}: no adapter_model.safetensors")
    return Adapter(directory, base if base.is_absolute() else directory / base, rank)


def read_layout(model_dir: Path) -> Layout:
    """ValueError, one line, where the directory holds no whole model."""
    return {t.name: (t.dtype, t.shape) for file in weight_files(model_dir) for t in decode_header(file)}
