"""Which models share GPUs, how many each set gets, and how each model is cut: HybridFlow (arXiv 2409.19256) section 6.

    Algorithm 1   for every partition of the models into colocated sets, for every allocation of GPUs to the sets above
                  the minimum that fits: the step's time with each model's best parallelism; keep the least
    Algorithm 2   for a model on n GPUs: t <= 8, p, d = n / (p t), the least simulated time of its stages

    stage = max over sets of sum over the set's models;  step = generation + preparation + training

Times are a roofline with communication (constants below). Allocations are whole nodes. Results are cached by argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.planner.devices import Device, ModelShape
from orchestrator.planner.latency import forward_prior, generate_prior

NODE_GPUS = 8
NVLINK_BYTES_S = 200e9
"""Achieved all-reduce bandwidth inside a node of A100s (600 GB/s peak, both directions). ASSUMED."""
NETWORK_BYTES_S = 20e9
"""Between nodes: 200 Gbit/s a machine (HybridFlow's test-bed), 80 % of it, shared by its GPUs' rings. ASSUMED."""
ALL_REDUCE_S = 20e-6
"""Latency of one tensor-parallel all-reduce. ASSUMED."""
TRAIN_BYTES = 18.0
"""Per parameter: bf16 weights and gradients, fp32 weights, gradients and two moments (Megatron's mixed precision)."""


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


@dataclass(frozen=True)
class Batch:
    """One step: `samples` of `prompt_tokens` + `response_tokens`, trained in `updates` mini-batches."""

    samples: int = 1024
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    updates: int = 8

    @property
    def tokens(self) -> int:
        return self.samples * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True)
class Parallelism:
    tensor: int
    pipeline: int
    data: int


@dataclass(frozen=True)
class Placement:
    """Sets of models with their GPUs, parallelism of each model, and the step's time."""

    sets: tuple[tuple[tuple[str, ...], int], ...]
    parallelism: Mapping[str, Parallelism]
    step_s: float

    @property
    def kind(self) -> str:
        """`colocate` (one set), `standalone` (a set for each model) or `split`."""
        if len(self.sets) == 1:
            return "colocate"
        return "standalone" if all(len(names) == 1 for names, _ in self.sets) else "split"


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every partition of `items` into sets (4 models: 15)."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]]


def allocations(total: int, minimum: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to give `total` nodes to the sets, each at least its minimum."""
    if len(minimum) == 1:
        if total >= minimum[0]:
            yield (total,)
        return
    for first in range(minimum[0], total - sum(minimum[1:]) + 1):
        for rest in allocations(total - first, minimum[1:]):
            yield (first, *rest)


def map_models(roles: Sequence[Role], gpu: Device, gpus: int, batch: Batch) -> Placement:
    """Algorithm 1. Raises ValueError when the models do not fit, saying how many GPUs they need."""
    if gpus % NODE_GPUS:
        raise ValueError(f"{gpus} GPUs are not whole nodes of {NODE_GPUS}")
    by_name = {role.name: role for role in roles}
    best: Placement | None = None
    for sets in partitions([role.name for role in roles]):
        minimum = [_nodes([by_name[name] for name in names], gpu) for names in sets]
        for nodes in allocations(gpus // NODE_GPUS, minimum):
            found = _evaluate([[by_name[name] for name in names] for names in sets], nodes, gpu, batch)
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found
    if best is None:
        need = NODE_GPUS * _nodes(list(roles), gpu)
        raise ValueError(f"{', '.join(by_name)} need at least {need} x {gpu.name}, there are {gpus}")
    return best


def fixed_mapping(sets: Sequence[Sequence[Role]], gpu: Device, gpus: int, batch: Batch) -> Placement | None:
    """The best allocation for given sets; None when they do not fit."""
    minimum = [_nodes(list(members), gpu) for members in sets]
    tried = [_evaluate(sets, nodes, gpu, batch) for nodes in allocations(gpus // NODE_GPUS, minimum)]
    found = [placement for placement in tried if placement is not None]
    return min(found, key=lambda m: m.step_s) if found else None


def _nodes(members: Sequence[Role], gpu: Device) -> int:
    usable = gpu.memory_gib * 2**30 * 0.8 * NODE_GPUS  # the rest is activations, keys and values
    return max(1, -(-int(sum(role.bytes for role in members)) // int(usable)))


def _evaluate(sets: Sequence[Sequence[Role]], nodes: Sequence[int], gpu: Device, batch: Batch) -> Placement | None:
    """None when a model has no parallelism that fits its set's GPUs."""
    generation = preparation = training = 0.0
    chosen: dict[str, Parallelism] = {}
    for members, count in zip(sets, nodes, strict=True):
        gpus = count * NODE_GPUS
        times = [t for role in members if (t := stage_times(role, gpu, gpus, batch)) is not None]
        if len(times) < len(members):
            return None
        generation = max(generation, sum(t.generation_s for t in times))
        preparation = max(preparation, sum(t.preparation_s for t in times))
        training = max(training, sum(t.training_s for t in times))
        chosen |= {role.name: t.parallelism for role, t in zip(members, times, strict=True)}
    named = tuple((tuple(r.name for r in s), n * NODE_GPUS) for s, n in zip(sets, nodes, strict=True))
    return Placement(named, chosen, generation + preparation + training)


@dataclass(frozen=True)
class StageTimes:
    generation_s: float
    preparation_s: float
    training_s: float
    parallelism: Parallelism


@lru_cache(maxsize=100_000)
def stage_times(role: Role, gpu: Device, gpus: int, batch: Batch) -> StageTimes | None:
    """Algorithm 2: the model's stages on `gpus` GPUs with the parallelism that is best for it; None: none fits."""
    generation_s = _generation_s(role.model, gpu, gpus, batch) if role.generates else 0.0
    found: list[StageTimes] = []
    for tensor in (1, 2, 4, 8):
        for pipeline in range(1, 17):
            if gpus % (tensor * pipeline) or role.model.layers % pipeline:
                continue
            if role.bytes / (tensor * pipeline) > 0.8 * gpu.memory_gib * 2**30:
                continue
            cut = Parallelism(tensor, pipeline, gpus // (tensor * pipeline))
            asked_s = 0.0 if role.generates else _pass_s(role.model, gpu, cut, batch, 1.0, 1)
            trained_s = _training_s(role.model, gpu, cut, batch) if role.trains else 0.0
            found.append(StageTimes(generation_s, asked_s, trained_s, cut))
    if not found:
        return None
    return min(found, key=lambda t: t.preparation_s + t.training_s)


def _generation_s(model: ModelShape, gpu: Device, gpus: int, batch: Batch) -> float:
    """Replicas of t GPUs side by side, the batch dealt out evenly; the best t."""
    times = []
    for tensor in (1, 2, 4, 8):
        if model.weight_bytes / tensor > 0.7 * gpu.memory_gib * 2**30 or gpus % tensor:
            continue
        cost = generate_prior(gpu, model, tensor)
        share = -(-batch.samples // (gpus // tensor))
        free_bytes = tensor * gpu.memory_gib * 2**30 * 0.9 - model.weight_bytes
        length = batch.prompt_tokens + batch.response_tokens
        slots = max(1, int(free_bytes / (model.kv_bytes_per_token * length)))
        rounds = -(-share // slots)
        steps = rounds * batch.response_tokens
        held = share * (batch.prompt_tokens * batch.response_tokens + batch.response_tokens**2 / 2)
        reduce_s = 0.0 if tensor == 1 else 2 * model.layers * ALL_REDUCE_S * steps
        times.append(cost.work_s(share * batch.prompt_tokens, steps, share * batch.response_tokens, held) + reduce_s)
    return min(times)


def _pass_s(model: ModelShape, gpu: Device, cut: Parallelism, batch: Batch, passes: float, updates: int) -> float:
    """Forward (passes = 1) or forward and backward (3) over the batch: compute, tensor all-reduces, bubble."""
    compute_s = passes * batch.tokens * forward_prior(gpu, model).token_s / (cut.tensor * cut.pipeline * cut.data)
    width = math.sqrt(model.parameters / (12 * model.layers))
    rank_tokens = batch.tokens / cut.data
    volume = 2 * passes * model.layers / cut.pipeline * rank_tokens * width * 2 * 2 * (cut.tensor - 1) / cut.tensor
    micro = max(1.0, batch.samples / (cut.data * updates))  # samples of one rank and update, one a micro-batch
    idle_share = max(1.0, 1.0 / (batch.samples / (cut.data * updates)))  # ranks without a sample wait
    bubble = 1.0 + (cut.pipeline - 1) / micro
    return (compute_s + volume / NVLINK_BYTES_S) * bubble * idle_share


def _training_s(model: ModelShape, gpu: Device, cut: Parallelism, batch: Batch) -> float:
    """`updates` times: forward and backward of a mini-batch, then the gradients' all-reduce over the data ranks."""
    work_s = _pass_s(model, gpu, cut, batch, 3.0, batch.updates)
    shard_bytes = model.parameters * 4 / (cut.tensor * cut.pipeline)  # fp32 gradients
    ring = 2 * (cut.data - 1) / cut.data * shard_bytes
    inside = cut.data * cut.tensor * cut.pipeline <= NODE_GPUS
    # Every GPU of a node has a ring of its own to the other nodes; they share the node's link.
    bandwidth = NVLINK_BYTES_S if inside else NETWORK_BYTES_S / min(NODE_GPUS, cut.tensor * cut.pipeline)
    return work_s + batch.updates * ring / bandwidth
