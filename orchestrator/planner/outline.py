"""What a step would take and cost with given shards: generation with its tail, the stages beside it, training.

0            generate: shards side by side, longest sample last; the tail moved together below the cut
first        reward, reference, critic: micro-batches of finished samples, on replicas of their own
both ended   train functions, side by side
end          what is kept was paid for all the time; the rest from its start to its last call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import FunctionLimits, Stage
from orchestrator.planner.fusion import Follower, follow, micro_batches, replica_counts
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.policies import Policy
from orchestrator.planner.scaling import Goal
from orchestrator.planner.tail import ShardState, Tail, TailChoice

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What the outline needs to know of the functions. `price`: of one replica of each, per second, in any unit."""

    generate: GenerateCost
    followers: Mapping[str, WorkCost]
    trainers: Mapping[str, WorkCost]
    start_s: Mapping[str, float]
    price: Mapping[str, float]
    limits: Mapping[str, FunctionLimits]
    warm: frozenset[str]
    """Up when the step begins."""
    name: str = "generate"
    pool_gpus: int | None = None
    """GPUs that all functions share; None: each function has its own."""


@dataclass(frozen=True)
class Outline:
    shards: Sequence[Sequence[int]]
    tail: TailChoice
    micro_batch: int
    followers: Mapping[str, Follower]
    keep: frozenset[str]
    time_s: float
    cost: float
    gpu_s: float
    paid_s: Mapping[str, float]
    """Replica-seconds, by function."""
    stages: Sequence[Stage]


def outline(
    shards: Sequence[Sequence[int]], states: Sequence[ShardState], mean_tokens: float, costs: Costs, policy: Policy,
    goal: Goal,
) -> Outline:  # fmt: skip
    """The step with these shards, its open choices (cut, micro-batch, replicas beside, keep) made for the goal."""
    generate, limits = costs.generate, costs.limits[costs.name]
    count = sum(len(s.lengths) for s in states)
    train_s = {name: cost.work_s(count, count * mean_tokens) for name, cost in costs.trainers.items()}
    last_s = sum(train_s.values()) if policy.colocated else max(train_s.values(), default=0.0)
    rest_price = sum(costs.price[name] * (seconds + costs.start_s[name]) for name, seconds in train_s.items())
    delay_s = 0.0 if costs.name in costs.warm else costs.start_s[costs.name]

    def value(choice: TailChoice) -> tuple[float, float]:
        paid = costs.price[costs.name] * (choice.replica_s + delay_s * len(shards))
        return goal.rank(delay_s + choice.time_s + last_s, paid + rest_price)

    end = Tail(states, generate, max_batch=limits.max_batch, kv_tokens=limits.kv_tokens)
    if policy.cut == "never":
        tail = end.uncut
    elif policy.cut == "fixed":
        tail = end.at(round(policy.cut_fraction * count))
    else:
        tail = end.best(value)
    finish_s = end.finish_s(tail) + delay_s
    best: Outline | None = None
    for micro_batch in _micro_batches(policy, count):
        found = _beside(shards, tail, finish_s, micro_batch, mean_tokens, train_s, last_s, delay_s, costs, policy, goal)
        if best is None or goal.rank(found.time_s, found.cost) < goal.rank(best.time_s, best.cost):
            best = found
    assert best is not None, "there is always the whole batch"
    return best


def _micro_batches(policy: Policy, count: int) -> list[int]:
    sizes = micro_batches(count)
    return {"no": sizes[:1], "yes": sizes[-1:], "chosen": sizes}[policy.fuse]


def _beside(
    shards: Sequence[Sequence[int]], tail: TailChoice, finish_s: Array, micro_batch: int, mean_tokens: float,
    train_s: Mapping[str, float], last_s: float, delay_s: float, costs: Costs, policy: Policy, goal: Goal,
) -> Outline:  # fmt: skip
    followers: dict[str, Follower] = {}
    for name, cost in costs.followers.items():
        start_s = 0.0 if name in costs.warm else costs.start_s[name]
        options = [
            follow(
                finish_s, mean_tokens, cost, micro_batch=micro_batch, replicas=replicas, start_s=start_s,
                prewarmed=policy.prewarm,
            )
            for replicas in _counts(policy, costs.limits[name].max_replicas)
        ]  # fmt: skip
        followers[name] = min(
            options,
            key=lambda f: goal.rank(
                max(f.end_s, float(finish_s[-1])) + last_s, costs.price[name] * f.replica_s + 1e-12
            ),
        )
    generated_s = float(finish_s[-1])
    ready_s = max([generated_s, *(f.end_s for f in followers.values())])
    if policy.colocated:  # stages beside each other share the GPUs: those that begin after generation take turns
        late = [max(0.0, f.end_s - max(f.begin_s, generated_s)) for f in followers.values()]
        ready_s = generated_s + sum(late)
    time_s = ready_s + last_s
    replicas = {costs.name: len(shards)} | {name: f.replicas for name, f in followers.items()}
    replicas |= {name: costs.limits[name].max_replicas if policy.replicas == "all" else 1 for name in train_s}
    paid = {costs.name: tail.replica_s + delay_s * len(shards)}
    paid |= {name: f.replica_s for name, f in followers.items()}
    paid |= {
        name: replicas[name] * (s + (0.0 if name in costs.warm else costs.start_s[name])) for name, s in train_s.items()
    }
    keep = _keep(replicas, paid, time_s, costs, policy)
    for name in keep:
        paid[name] = replicas[name] * time_s
    total = sum(costs.price[name] * seconds for name, seconds in paid.items())
    gpu_s = sum(costs.limits[name].gpus * seconds for name, seconds in paid.items())
    if policy.colocated and costs.pool_gpus is not None:
        gpu_s = costs.pool_gpus * time_s
    stages = [Stage(costs.name, delay_s, generated_s)]
    stages += [Stage(name, f.begin_s, f.end_s) for name, f in followers.items()]
    stages += [Stage(name, ready_s, ready_s + s) for name, s in train_s.items()]
    return Outline(shards, tail, micro_batch, followers, keep, time_s, total, gpu_s, paid, stages)


def _counts(policy: Policy, limit: int) -> list[int]:
    return [limit] if policy.replicas == "all" else replica_counts(limit)


def _keep(
    replicas: Mapping[str, int], paid_s: Mapping[str, float], time_s: float, costs: Costs, policy: Policy
) -> frozenset[str]:
    """Held over the step's idle time when that is shorter than the cold start it saves, for each replica on average."""
    if policy.keep == "all":
        return frozenset(replicas)
    if policy.keep == "none":
        return frozenset()
    idle = {name: time_s - paid_s[name] / count for name, count in replicas.items()}
    return frozenset(name for name, seconds in idle.items() if seconds < costs.start_s[name])
