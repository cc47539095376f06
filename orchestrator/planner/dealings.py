"""Which ways to deal the samples to replicas are worth working out: each with a first estimate of its step.

Runs of similar length, for every number of replicas (assignment.py); and equal work for each, on all replicas or fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from orchestrator.planner.assignment import Filler, Workload, makespan_s, sweep, together
from orchestrator.planner.assignment import shards as shards_of
from orchestrator.planner.base import GENERATE, CurvePoint
from orchestrator.planner.case import After, Case
from orchestrator.planner.lengths import Prediction
from orchestrator.planner.prefixes import Prefixes
from orchestrator.planner.scaling import best
from orchestrator.planner.static import balance
from orchestrator.planner.tail import ShardState

EIGHTHS = (8, 4, 2)
"""Of the replicas, that equal work is dealt to where training streams: others leave it room."""
FREE = 0.8
"""Of the GPUs that generation leaves free, what streamed training can use: first groups take a while to be whole."""


@dataclass(frozen=True)
class Dealing:
    shards: list[list[int]]
    estimate: CurvePoint | None
    """Of runs; of equal work there is none: it is always worked out."""


def dealings(case: Case, predicted: Prediction, prefixes: Prefixes, replicas: int) -> list[Dealing]:
    """Raises Unmet for a sample that does not fit a replica's keys and values."""
    policy, found = case.policy, list[Dealing]()
    filler = _filler(case, predicted, prefixes.head, replicas)
    if policy.shards != "balanced":
        found += _runs(case, filler, replicas)
    if policy.shards == "similar":
        return found
    n = case.load.per_prompt
    eighths = EIGHTHS if policy.stream and case.may_stream else EIGHTHS[:1]
    families = prefixes.families() if policy.shards == "chosen" else np.zeros(0, np.int64)
    for count in dict.fromkeys(max(1, replicas * k // 8) for k in eighths):
        ways = [balance(predicted.mean.tolist(), count)]
        if 1 < len(np.unique(families)) < len(families) and count > 1:
            ways.append(together(predicted.mean, families, count))
        found += [Dealing([[row * n + i for row in shard for i in range(n)] for shard in way], None) for way in ways]
    return found


def _filler(case: Case, predicted: Prediction, head: int, replicas: int) -> Filler:
    """A shard's longest sample is taken to be the largest of as many draws as there are samples to a replica."""
    n, limits = case.load.per_prompt, case.costs.limits[GENERATE]
    prompt_tokens = case.load.prompt_tokens[::n]
    each = max(1.0, len(prompt_tokens) * n / replicas)
    longest = predicted.at_quantile(1.0 - 1.0 / (each + 1.0))
    load = Workload.of(prompt_tokens, predicted.mean, longest, n, head)
    return Filler(load, case.costs.generate, limits.max_batch, limits.kv_tokens)


def _runs(case: Case, filler: Filler, replicas: int) -> list[Dealing]:
    """Runs of similar length for each N.

    What follows generation: the train functions that are not streamed, and of all other work what the GPUs that
    generation leaves free do not get done beside it.
    """
    costs, pool, load = case.costs, case.costs.pool_gpus, filler.load
    predicted = float((load.prompt_tokens + load.head_tokens + load.mean).sum()) * load.samples_per_prompt
    after = After.of(case, predicted)
    gpus, price = costs.limits[GENERATE].gpus, costs.price[GENERATE]
    stream_gpu_s = after.stream_gpu_s + after.stream_shared_gpu_s + after.stream_call_gpu_s
    found: list[Dealing] = []
    for size, runs in sweep(filler, replicas).items():
        paid_s, span_s, late_s = sum(run.work_s for run in runs) + size * case.delay_s, makespan_s(runs), 0.0
        if case.streamed and pool is not None:
            free_gpu_s = FREE * (pool * span_s - gpus * paid_s)
            late_s = max(0.0, after.follow_gpu_s + stream_gpu_s - free_gpu_s) / pool
        time_s = case.delay_s + span_s + max(after.late_s, after.stream_own_s) + late_s
        cost = price * paid_s + after.follow_cost + after.train_cost
        found.append(Dealing(shards_of(load, runs), CurvePoint(size, time_s, cost, gpus * paid_s)))
    return found


def promising(case: Case, every: Sequence[Dealing], detailed: bool) -> list[Dealing]:
    """Those that are worked out in full: for each exchange the one whose estimate is best (`detailed`: all), and those
    of equal work."""
    rough = [(dealing, p) for dealing in every if (p := dealing.estimate) is not None]
    if rough and case.policy.replicas != "weighted" and not detailed:
        time_s, cost = np.array([(p.time_s, p.cost_usd) for _, p in rough]).T
        exchange = np.array(case.exchanges)
        places = best(exchange, *np.broadcast_arrays(time_s, cost, np.empty((len(exchange), 1)))[:2])
        rough = [rough[k] for k in sorted({*places.tolist()})]
    return [*(dealing for dealing, _ in rough), *(d for d in every if d.estimate is None)]


def states(case: Case, shards: Sequence[Sequence[int]], prefixes: Prefixes) -> list[ShardState]:
    """What the drawn lengths make of each shard; every distinct prefix of its prompts is computed once."""
    load, cost, max_batch = case.load, case.costs.generate, case.costs.limits[GENERATE].max_batch
    sizes = np.array([len(shard) for shard in shards])
    numbers = np.fromiter(chain.from_iterable(shards), np.int64, int(sizes.sum()))
    places = np.repeat(np.arange(len(shards)), sizes)
    prefill = prefixes.tokens_of(numbers // load.per_prompt, places, len(shards)).tolist()
    each = np.split(numbers, np.cumsum(sizes)[:-1])
    prompts, lengths = [load.prompt_tokens[shard] for shard in each], [load.lengths[shard] for shard in each]
    if int(sizes.max()) <= max_batch:
        return ShardState.together(prompts, lengths, cost, max_batch, prefill, each)
    return [
        ShardState.of(prompts[k], lengths[k], cost, max_batch, prefill[k], shard) for k, shard in enumerate(each)
    ]  # fmt: skip
