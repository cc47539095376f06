"""A gang's mesh: what its ranks share. No torch: a job is checked with it before anything runs.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp       tp varies fastest: those ranks talk the most, and lie on one node
The axes and their order are torchtitan's and verl's. What is left of the ranks is dp: FSDP2 shards over it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AXES = ("pp", "dp", "cp", "tp")
"""Of a gang's mesh, outermost first."""
SPLIT_ARCHITECTURES = frozenset(
    ("gemma3_text", "granite", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
)
"""model_type of architectures whose layers divide by heads, columns and experts, and whose stages are rows of layers
(tests/train/test_mesh.py checks each)."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """`parallel` of a gang."""

    tp: int = 1
    """Ranks that share each layer: heads, columns of the MLP, experts."""
    pp: int = 1
    """Stages that the layers are divided into."""
    cp: int = 1
    """Ranks that share each pack's tokens, and in attention its heads; alone, or with dp."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis}: got {getattr(self, axis)}, wants 1 or more")
        if self.cp > 1 and self.tp * self.pp > 1:
            raise ValueError(f"cp: got {self.cp}, wants 1 with tp {self.tp} and pp {self.pp}: it goes with dp alone")

    @property
    def size(self) -> int:
        """Ranks that hold one copy of the model, were dp not to shard it."""
        return self.tp * self.pp * self.cp

    def ranks(self, most: int) -> int:
        """The most of so many that it divides; at least those of one copy."""
        return max(self.size, most - most % self.size)

    def dp(self, ranks: int) -> int:
        """ValueError where the mesh does not divide the ranks."""
        if ranks % self.size:
            raise ValueError(f"{ranks} ranks are no multiple of tp {self.tp} x pp {self.pp} x cp {self.cp}")
        return ranks // self.size

    def shape(self, ranks: int) -> tuple[int, ...]:
        """Of the mesh, in the order of AXES."""
        return (self.pp, self.dp(ranks), self.cp, self.tp)

    def check(self, config: Mapping[str, Any], *, lora: bool = False) -> None:
        """ValueError where the model of this config.json does not divide so."""
        kind = config.get("model_type")
        if self.tp > 1 and lora:
            raise ValueError("tp: wants model.lora_rank = 0: adapters are small, and train by dp alone")
        if self.size > 1 and kind not in SPLIT_ARCHITECTURES:
            known = ", ".join(sorted(SPLIT_ARCHITECTURES))
            raise ValueError(f"a model of type {kind!r} is not divided by tp, pp or cp, only by dp (known are {known})")
        heads = ["num_attention_heads", "num_key_value_heads"]
        for axis, keys in (("tp", [*heads, "intermediate_size", "num_experts"]), ("cp", heads)):
            size = getattr(self, axis)
            for key in keys:
                count = config.get(key)
                if isinstance(count, int) and count % size:
                    raise ValueError(f"{axis}: got {size}, does not divide the model's {key}, which is {count}")
        layers = config.get("num_hidden_layers")
        if isinstance(layers, int) and layers < self.pp:
            raise ValueError(f"pp: got {self.pp}, the model has {layers} layers")


DATA_PARALLEL = Parallel()
