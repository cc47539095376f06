"""The training stage of a PPO step as pipelines: actor and critic one after the other in 1F1B, or in one fused schedule
(RLHFuse, arXiv 2409.13221, section 5).

Both models run on all GPUs, tensor parallel in a node, a stage to a node. The larger has stages on `deep` nodes; the
smaller one's fewer stages run on the same nodes in the opposite direction, in as many replicas as they have room for.
Micro-batches are even in tokens. Turns are those of mapping_costs.py, the backward twice the forward. After a
mini-batch both models' gradients are reduced and their optimizers step; that is charged alike to both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.papers.mapping_costs import (
    NODE_GPUS,
    Cluster,
    Parallelism,
    Role,
    activation_bytes,
    pipeline_s,
    turn_s,
    update_s,
    usable_bytes,
)
from bench.papers.schedules import simulate
from functions.train.schedules import Pipelines, search

FINEST = 24
"""The search works with forwards of at most so many units: equal times are found where they are nearly equal."""


@dataclass(frozen=True)
class Training:
    """Seconds of one mini-batch's pipelines, each way with the micro-batches that are best for it, and of its updates.
    [samples to a micro-batch]"""

    serial_s: float
    serial_size: int
    fused_s: float
    fused_size: int
    bound_s: float
    """What no fused schedule of those micro-batches can beat."""
    update_s: float


@dataclass(frozen=True)
class Trained:
    role: Role
    cut: Parallelism

    @classmethod
    def of(cls, role: Role, stages: int, gpus: int) -> Trained:
        return cls(role, Parallelism(NODE_GPUS, stages, gpus // (NODE_GPUS * stages)))


def train(cluster: Cluster, models: Sequence[Trained], samples: int, tokens: int) -> Training:
    """A mini-batch of `samples` of `tokens` each on average. Raises ValueError where no micro-batch fits."""
    large, small = sorted(models, key=lambda model: -model.cut.pipeline)
    sizes = [size for size in (1, 2, 4, 8) if samples % (size * max(m.cut.data for m in models)) == 0]
    serial, fused = [], []
    for size in sizes:
        times = [pipeline_s(m.role, cluster, m.cut, samples // m.cut.data, size, tokens, training=True) for m in models]
        serial.append((sum(times), size))
        pipelines, room = _pipelines(cluster, large, small, samples, size, tokens)
        if room >= pipelines.pp0 * pipelines.mem0:
            fused.append((_makespan_s(pipelines, room), size, pipelines.lower_bound() * 1e-6))
    if not fused:
        raise ValueError(f"no micro-batch of {tokens} tokens fits beside the states of both models")
    best, size, bound_s = min(fused)
    updates_s = sum(update_s(m.role.model, cluster, m.cut) for m in models)
    return Training(*min(serial), best, size, bound_s, updates_s)


def _pipelines(
    cluster: Cluster, large: Trained, small: Trained, samples: int, size: int, tokens: int
) -> tuple[Pipelines, float]:
    """The problem in microseconds and bytes, and the bytes that a node's GPU has for activations."""
    turns = [turn_s(m.role, cluster, m.cut, size * tokens, training=True) for m in (large, small)]
    held = [activation_bytes(m.role.model, m.cut, size * tokens) for m in (large, small)]
    forward = [max(1, round(turn / 3 * 1e6)) for turn in turns]
    batches = [samples // (m.cut.data * size) for m in (large, small)]
    room = usable_bytes(cluster.gpu) - sum(m.role.bytes / m.cut.model for m in (large, small))
    return Pipelines(large.cut.pipeline, small.cut.pipeline, *batches, *forward, *held), room


def _makespan_s(pipelines: Pipelines, room: float) -> float:
    """Of the schedule that the search finds with rounded times, evaluated with the true ones."""
    unit = max(pipelines.f0, pipelines.f1) / FINEST
    rounded = replace(pipelines, f0=max(1, round(pipelines.f0 / unit)), f1=max(1, round(pipelines.f1 / unit)))
    return simulate(pipelines, search(rounded, memory=room, solver_s=2.0).orders) * 1e-6
