"""What a model's stages of a step take on n GPUs, by how it is cut: the simulator of HybridFlow's Algorithm 2.

Compute is the roofline's, made worse by what a cut costs, each from first principles:

    pipeline   1F1B: (m + p - 1) turns of the slowest stage, m = micro-batches of one data rank (Narayanan et al., arXiv
               2104.04473, section 2.2). The slowest stage is the last: it has the output layer beside its layers.
               Each turn hands activations on to the next stage, over the network.
    tensor     2 all-reduces of a layer's activations forward, 2 backward (Shoeybi et al., arXiv 1909.08053, section 3)
    kernels    a product of [M, N] is made in tiles of 128 x 128, 108 at a time on an A100: what the last turn does not
               fill is lost (NVIDIA, "Matrix Multiplication Background", wave quantization). Small where t is large
               and micro-batches are small.
    data       each update's fp32 gradients go around a ring once there and once back, and the optimizer reads and
               writes its states
    memory     activations of the micro-batches in flight (Korthikanti et al., arXiv 2205.05198, equation 2, without the
               attention matrix) beside the model's states
    hand-over  training layout to generation layout: (t p - t_g) / (t_g t p) of the weights to each GPU (HybridFlow,
               table 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.planner.devices import Device, ModelShape, device
from orchestrator.planner.latency import forward_prior, generate_prior

NODE_GPUS = 8
ALL_REDUCE_S = 20e-6
"""Latency of one tensor-parallel all-reduce. ASSUMED."""
TRAIN_BYTES = 18.0
"""Per parameter: bf16 weights, fp32 gradients, fp32 weights and two moments (HybridFlow section 8.1)."""
OPTIMIZER_BYTES = 30.0
"""Per parameter and update: fp32 gradient, weight and moments read, weight, moments and bf16 weight written."""
USABLE = 0.8
"""Of a GPU's memory, for states and activations. The rest: buffers, fragments, keys and values."""
TILE = 128
VOCABULARY = 32_000
"""Llama's and Llama 2's."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of 8 GPUs of one kind."""

    gpu: Device
    multiprocessors: int
    nvlink_bytes_s: float
    """Achieved all-reduce bandwidth inside a node. ASSUMED: a third of the peak of both directions."""
    network_bytes_s: float
    """Of a node to the others, shared by its GPUs. ASSUMED: 80 % of the link."""


HYBRIDFLOW = Cluster(device("A100"), 108, 200e9, 20e9)
"""Its test-bed (section 8.1): NVLink of 600 GB/s, 200 Gbit/s a machine."""
RLHFUSE = Cluster(device("H100"), 132, 300e9, 160e9)
"""Its test-bed (section 7): Hopper, here with H100's NVLink of 900 GB/s; 8 x 200 Gbit/s a machine."""


@dataclass(frozen=True)
class Role:
    """A model of the job: `actor` generates and trains, `critic` is asked and trains, the others are asked."""

    name: str
    model: ModelShape
    trains: bool
    generates: bool = False

    @property
    def bytes(self) -> float:
        return self.model.parameters * (TRAIN_BYTES if self.trains else self.model.bytes_per_value)

    @property
    def predicts_tokens(self) -> bool:
        """Its last stage has the output layer; a critic's or reward model's has one row."""
        return self.generates or self.name == "reference"


@dataclass(frozen=True)
class Batch:
    """One step: `samples` of `prompt_tokens` + `response_tokens`, trained in `updates` mini-batches.

    The defaults are HybridFlow's (section 8.1).
    """

    samples: int = 1024
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    updates: int = 8

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Parallelism:
    tensor: int
    pipeline: int
    data: int

    @property
    def model(self) -> int:
        """GPUs that hold the model once."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class StageTimes:
    generation_s: float
    preparation_s: float
    training_s: float
    parallelism: Parallelism

    @property
    def total_s(self) -> float:
        return self.generation_s + self.preparation_s + self.training_s


@lru_cache(maxsize=100_000)
def stage_times(
    role: Role, cluster: Cluster, gpus: int, batch: Batch, max_pipeline: int | None = None
) -> StageTimes | None:
    """Algorithm 2: the model's stages on `gpus` GPUs with the parallelism that is best for it; None: none fits."""
    found = [
        t for cut in cuts(role, cluster, gpus, max_pipeline) if (t := times_of(role, cluster, cut, batch)) is not None
    ]
    return min(found, key=lambda t: t.total_s) if found else None


def cuts(role: Role, cluster: Cluster, gpus: int, max_pipeline: int | None = None) -> Iterator[Parallelism]:
    """Every way to use all `gpus` for which the model's states fit. `max_pipeline`: stages that the training framework
    has at most (FSDP: 1); None: any number.
    """
    for tensor in (1, 2, 4, 8):
        for pipeline in range(1, min(role.model.layers, max_pipeline or role.model.layers) + 1):
            fits = role.bytes / (tensor * pipeline) <= usable_bytes(cluster.gpu)
            if fits and gpus % (tensor * pipeline) == 0 and role.model.layers % pipeline == 0:
                yield Parallelism(tensor, pipeline, gpus // (tensor * pipeline))


def times_of(role: Role, cluster: Cluster, cut: Parallelism, batch: Batch) -> StageTimes | None:
    """With that cut; None where no micro-batch's activations fit, or no generation layout."""
    generation_s = preparation_s = training_s = 0.0
    if role.generates:
        generation_s = _generation_s(role.model, cluster, cut, batch)
    else:
        preparation_s = pass_s(role, cluster, cut, batch.samples, batch.length, training=False)
    if role.trains:
        one_s = pass_s(role, cluster, cut, batch.samples / batch.updates, batch.length, training=True)
        training_s = batch.updates * (one_s + update_s(role.model, cluster, cut))
    times = StageTimes(generation_s, preparation_s, training_s, cut)
    return times if math.isfinite(times.total_s) else None


def width(model: ModelShape) -> float:
    """Hidden size of a transformer with 12 h^2 parameters a layer. Llama-2-13B: 5207 (it has 5120)."""
    return math.sqrt(model.parameters / (12 * model.layers))


def filled(tokens: float, model: ModelShape, tensor: int, multiprocessors: int) -> float:
    """Share of the GPU's tiles that a layer's products of `tokens` rows fill, by their work."""
    h = width(model)
    work = time = 0.0
    for n, k in ((3 * h / tensor, h), (h, h / tensor), (4 * h / tensor, h), (h, 4 * h / tensor)):
        tiles = math.ceil(tokens / TILE) * math.ceil(n / TILE)
        work += tokens * n * k
        time += math.ceil(tiles / multiprocessors) * multiprocessors * TILE * TILE * k
    return work / time


def pass_s(role: Role, cluster: Cluster, cut: Parallelism, samples: float, length: int, *, training: bool) -> float:
    """Forward, or forward and backward, over `samples` with the micro-batch size that is best; inf: none fits."""
    own = max(1, math.ceil(samples / cut.data))  # of the data rank with the most: the others wait
    sizes = sorted({min(own, 1 << k) for k in range(6)})
    return min(pipeline_s(role, cluster, cut, own, size, length, training=training) for size in sizes)


def pipeline_s(
    role: Role, cluster: Cluster, cut: Parallelism, samples: int, size: int, length: int, *, training: bool
) -> float:
    """1F1B over the `samples` of one data rank in micro-batches of `size`; inf: their activations do not fit."""
    micro_batches = math.ceil(samples / size)
    if training and role.bytes / cut.model + min(micro_batches, cut.pipeline) * activation_bytes(
        role.model, cut, size * length
    ) > usable_bytes(cluster.gpu):
        return math.inf
    return (micro_batches + cut.pipeline - 1) * turn_s(role, cluster, cut, size * length, training=training)


def turn_s(role: Role, cluster: Cluster, cut: Parallelism, tokens: float, *, training: bool) -> float:
    """The slowest stage's forward (and backward) over a micro-batch of `tokens`, handed on to the next stage."""
    model, h = role.model, width(role.model)
    passes, reduces, hands = (3.0, 4, 2) if training else (1.0, 2, 1)
    flops_s = passes * forward_prior(cluster.gpu, model).token_s * tokens / (model.layers * cut.tensor)
    layer_s = flops_s / filled(tokens, model, cut.tensor, cluster.multiprocessors)
    if cut.tensor > 1:
        ring = 2 * (cut.tensor - 1) / cut.tensor * tokens * h * 2
        layer_s += reduces * (ring / cluster.nvlink_bytes_s + ALL_REDUCE_S)
    # V h parameters, in units of a layer's 12 h^2
    output_s = VOCABULARY / (12 * h) * flops_s if role.predicts_tokens else 0.0
    hand_s = 0.0
    if cut.pipeline > 1:  # each of the node's stages sends its activations once, over NVLink where both are in the node
        inside = cut.model <= NODE_GPUS
        share = cluster.nvlink_bytes_s if inside else cluster.network_bytes_s / (NODE_GPUS / cut.tensor)
        hand_s = hands * tokens * h * 2 / share
    return math.ceil(model.layers / cut.pipeline) * layer_s + output_s + hand_s


def activation_bytes(model: ModelShape, cut: Parallelism, tokens: float) -> float:
    """Of one micro-batch on one stage, held from its forward to its backward: s b h (10 + 24 / t) a layer."""
    return tokens * width(model) * (10 + 24 / cut.tensor) * math.ceil(model.layers / cut.pipeline)


def usable_bytes(gpu: Device) -> float:
    return USABLE * gpu.memory_gib * 2**30


def update_s(model: ModelShape, cluster: Cluster, cut: Parallelism) -> float:
    """The gradients' all-reduce over the data ranks, and the optimizer's step over the states of one GPU."""
    ring = 2 * (cut.data - 1) / cut.data * model.parameters * 4 / cut.model
    inside = cut.data * cut.model <= NODE_GPUS
    # Every GPU of a node that holds other parameters is in a ring of its own to the other nodes; they share its link.
    bandwidth = cluster.nvlink_bytes_s if inside else cluster.network_bytes_s / min(NODE_GPUS, cut.model)
    states_s = OPTIMIZER_BYTES * model.parameters / cut.model / (USABLE * cluster.gpu.peak_tb_s * 1e12)
    return ring / bandwidth + states_s


def _generation_s(model: ModelShape, cluster: Cluster, cut: Parallelism, batch: Batch) -> float:
    """Replicas of t_g GPUs side by side, the batch dealt out evenly, after the hand-over; the best t_g."""
    times = [math.inf]
    for tensor in (1, 2, 4, 8):
        if tensor > cut.tensor or model.weight_bytes / tensor > 0.7 * cluster.gpu.memory_gib * 2**30:
            continue
        cost = generate_prior(cluster.gpu, model, tensor)
        share = -(-batch.samples // (cut.model * cut.data // tensor))
        free_bytes = tensor * cluster.gpu.memory_gib * 2**30 * 0.9 - model.weight_bytes
        slots = max(1, int(free_bytes / (model.kv_bytes_per_token * batch.length)))
        steps = -(-share // slots) * batch.response_tokens
        held = share * (batch.prompt_tokens * batch.response_tokens + batch.response_tokens**2 / 2)
        reduce_s = 0.0 if tensor == 1 else 2 * model.layers * ALL_REDUCE_S * steps
        work_s = cost.work_s(share * batch.prompt_tokens, steps, share * batch.response_tokens, held)
        times.append(work_s + reduce_s + _hand_over_s(model, cluster, cut, tensor))
    return min(times)


def _hand_over_s(model: ModelShape, cluster: Cluster, cut: Parallelism, tensor: int) -> float:
    volume = (cut.model - tensor) / (tensor * cut.model) * model.weight_bytes
    return volume / (cluster.nvlink_bytes_s if cut.model <= NODE_GPUS else cluster.network_bytes_s / NODE_GPUS)
