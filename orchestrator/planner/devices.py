"""What a GPU does at best, and which share of it a serving or training engine gets: the roofline's constants.

Provenance of every number is in `Device.source`. `weights_fraction` and `kv_fraction` are fitted to published times per
output token (bf16, context 600, batch 1 / 64 / 256; tests/planner/test_devices.py holds the table):
3B L40S 11.1 / 14.5 / 24.9 ms, 7B L40S 25.1 / 30.3 / 46.0, 7B H100 7.2 / 8.8 / 13.5, 70B TP4 H100 16.8 / 18.8 / 25.2.
Decode reads all weights once a step (slope 0 in the batch) and each sequence's keys and values (slope per token held);
the second is read at a lower share of the bandwidth than the first.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    name: str
    peak_tflops: float
    """Dense bf16, without sparsity, in 1e12 FLOP/s."""
    peak_tb_s: float
    """Memory bandwidth in 1e12 bytes/s."""
    memory_gib: float
    prefill_fraction: float
    """Share of the peak FLOP/s that prefill (and any forward or backward over many tokens) gets."""
    weights_fraction: float
    """Share of the peak bandwidth at which a decode step reads the weights."""
    kv_fraction: float
    """Share of the peak bandwidth at which a decode step reads keys and values."""
    usd_per_hour: float | None
    """On-demand price of one GPU, us-east-1 (a catalogue value: check yours); None: no price on record."""
    source: str
    allreduce_s: float = 0.0
    """Of a small all-reduce between the GPUs of one replica (tensor parallelism), twice a layer;"""
    allreduce_byte_s: float = 0.0
    """and for each byte more. 0: inside the shares above, which were fitted to a replica of several GPUs (NVLink)."""


_VENDOR = "peaks: vendor data sheet; prefill share: inference-sim (Apache-2.0)"
_DECODE = "decode shares fitted to the published times per output token"
_ASSUMED = "decode shares ASSUMED equal to H100's: no time per output token on record"

_PCIE = (
    "no NVLink: all-reduce as measured with NCCL in a CUDA graph over a PCIe switch, 4 ranks, 19.4 us for 4 KB, "
    "83.5 us for 384 KB (github.com/haohervchb/sglang-V100 pull 2)"
)

DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("H100", 989.5, 3.35, 80, 0.45, 0.63, 0.43, 12.29, f"{_VENDOR}; {_DECODE}; price p5.48xlarge / 8"),
        Device("H200", 989.5, 4.8, 141, 0.45, 0.63, 0.43, None, f"{_VENDOR} (H100's); {_ASSUMED}; no price on record"),
        Device("A100", 312.0, 2.039, 80, 0.38, 0.63, 0.43, 5.12, f"{_VENDOR}; {_ASSUMED}; price p4de.24xlarge / 8"),
        Device("L40S", 362.0, 0.864, 48, 0.32, 0.67, 0.48, 3.77,
               f"{_VENDOR}; {_DECODE}; price g6e.48xlarge / 8; {_PCIE}", 20e-6, 1.65e-10),
    )
}  # fmt: skip


def device(name: str) -> Device:
    """The device called `name`. Raises ValueError listing the table for one that is not in it."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not in the table (wants one of {', '.join(sorted(DEVICES))})")
    return DEVICES[name]


@dataclass(frozen=True)
class ModelShape:
    """What the roofline needs of a decoder-only transformer."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int = 0
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value


SHAPES: dict[str, ModelShape] = {
    s.name: s
    for s in (
        # From the models' published config.json files.
        ModelShape("Qwen2.5-0.5B", 0.494e9, 24, 2, 64, 896),
        ModelShape("Qwen2.5-3B", 3.086e9, 36, 2, 128, 2048),
        ModelShape("Qwen2.5-7B", 7.616e9, 28, 4, 128, 3584),
        ModelShape("Llama-2-7B", 6.738e9, 32, 32, 128, 4096),
        ModelShape("Llama-2-13B", 13.016e9, 40, 40, 128, 5120),
        ModelShape("Llama-33B", 32.529e9, 60, 52, 128, 6656),
        ModelShape("Llama-34B", 33.744e9, 48, 8, 128, 8192),
        ModelShape("Llama-65B", 65.286e9, 80, 64, 128, 8192),
        ModelShape("Llama-2-70B", 68.977e9, 80, 8, 128, 8192),
    )
}


def shape(name: str) -> ModelShape:
    """The model called `name`. Raises ValueError listing the table for one that is not in it."""
    if name not in SHAPES:
        raise ValueError(f"model {name!r} has no shape in the table (wants one of {', '.join(sorted(SHAPES))})")
    return SHAPES[name]


def kv_capacity_tokens(gpu: Device, model: ModelShape, tensor_parallel: int, *, usable: float = 0.9) -> int:
    """Tokens whose keys and values fit beside the weights on `tensor_parallel` GPUs. With more GPUs than key heads
    each head is held by several (vLLM replicates them).

    `usable` is vLLM's gpu_memory_utilization default. Raises ValueError when not even the weights fit.
    """
    free_bytes = tensor_parallel * gpu.memory_gib * 2**30 * usable - model.weight_bytes
    if free_bytes < model.kv_bytes_per_token:
        need = -(-model.weight_bytes // (gpu.memory_gib * 2**30 * usable))
        raise ValueError(f"{model.name} does not fit on {tensor_parallel} x {gpu.name} (wants at least {need:.0f})")
    copies = max(1.0, tensor_parallel / model.kv_heads)
    return int(free_bytes // (copies * model.kv_bytes_per_token))
