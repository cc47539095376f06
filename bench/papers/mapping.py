"""Which models share GPUs, how many each set gets, and how each model is cut: HybridFlow (arXiv 2409.19256) section 6.

    Algorithm 1   for every partition of the models into colocated sets, for every allocation of GPUs to the sets above
                  the minimum that fits: the step's time with each model's best parallelism; keep the least
    Algorithm 2   for a model on n GPUs: t <= 8, p, d = n / (p t), the least simulated time of its stages
                  (mapping_costs.py)

    stage = max over sets of sum over the set's models;  step = generation + preparation + training

Allocations are whole nodes. Results are cached by argument. `max_pipeline`: see mapping_costs.cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.papers.mapping_costs import NODE_GPUS, Batch, Cluster, Parallelism, Role, stage_times, usable_bytes


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


def map_models(
    roles: Sequence[Role], cluster: Cluster, gpus: int, batch: Batch, max_pipeline: int | None = None
) -> Placement:
    """Algorithm 1. Raises ValueError when the models do not fit, saying how many GPUs they need."""
    if gpus % NODE_GPUS:
        raise ValueError(f"{gpus} GPUs are not whole nodes of {NODE_GPUS}")
    by_name = {role.name: role for role in roles}
    best: Placement | None = None
    for sets in partitions([role.name for role in roles]):
        minimum = [_nodes([by_name[name] for name in names], cluster) for names in sets]
        for nodes in allocations(gpus // NODE_GPUS, minimum):
            found = _evaluate(
                [[by_name[name] for name in names] for names in sets], nodes, cluster, batch, max_pipeline
            )
            if found is not None and (best is None or found.step_s < best.step_s):
                best = found
    if best is None:
        need = NODE_GPUS * _nodes(list(roles), cluster)
        raise ValueError(f"{', '.join(by_name)} need at least {need} x {cluster.gpu.name}, there are {gpus}")
    return best


def fixed_mapping(
    sets: Sequence[Sequence[Role]], cluster: Cluster, gpus: int, batch: Batch, max_pipeline: int | None = None
) -> Placement | None:
    """The best allocation for given sets; None when they do not fit."""
    minimum = [_nodes(list(members), cluster) for members in sets]
    tried = [_evaluate(sets, nodes, cluster, batch, max_pipeline) for nodes in allocations(gpus // NODE_GPUS, minimum)]
    found = [placement for placement in tried if placement is not None]
    return min(found, key=lambda m: m.step_s) if found else None


def _nodes(members: Sequence[Role], cluster: Cluster) -> int:
    usable = usable_bytes(cluster.gpu) * NODE_GPUS
    return max(1, -(-int(sum(role.bytes for role in members)) // int(usable)))


def _evaluate(
    sets: Sequence[Sequence[Role]], nodes: Sequence[int], cluster: Cluster, batch: Batch, max_pipeline: int | None
) -> Placement | None:
    """None when a model has no parallelism that fits its set's GPUs."""
    generation = preparation = training = 0.0
    chosen: dict[str, Parallelism] = {}
    for members, count in zip(sets, nodes, strict=True):
        gpus = count * NODE_GPUS
        times = [t for role in members if (t := stage_times(role, cluster, gpus, batch, max_pipeline)) is not None]
        if len(times) < len(members):
            return None
        generation = max(generation, sum(t.generation_s for t in times))
        preparation = max(preparation, sum(t.preparation_s for t in times))
        training = max(training, sum(t.training_s for t in times))
        chosen |= {role.name: t.parallelism for role, t in zip(members, times, strict=True)}
    named = tuple((tuple(r.name for r in s), n * NODE_GPUS) for s, n in zip(sets, nodes, strict=True))
    return Placement(named, chosen, generation + preparation + training)
