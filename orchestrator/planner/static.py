"""The simplest honest planner: as many replicas as configured, prompts dealt out so that all finish together.

Balance is greedy longest-first (LPT, Graham 1969: at most 4/3 - 1/(3 N) of the best possible longest shard) over each
prompt's last seen lengths; with no history every prompt counts the same, so that shards differ by one prompt at most.
"""

import heapq
import statistics
from collections.abc import Mapping, Sequence

from orchestrator.planner.base import GENERATE, TAIL, CallObservation, PastStep, StepObservation, StepPlan, StepRequest
from orchestrator.planner.episodes import EpisodeModel


def check(request: StepRequest) -> None:
    """Raises ValueError, in one line, for a request that no planner can plan.

    No prompts is a request: a step that only validates.
    """
    if request.samples_per_prompt < 1:
        raise ValueError(f"step {request.step}: samples_per_prompt is {request.samples_per_prompt} (wants >= 1)")
    if request.max_response_length < 1:
        raise ValueError(f"step {request.step}: max_response_length is {request.max_response_length} (wants >= 1)")
    if GENERATE not in request.functions:
        raise ValueError(f"step {request.step}: no function {GENERATE!r} among {sorted(request.functions)}")
    for name, limits in request.functions.items():
        if limits.max_replicas < 1:
            raise ValueError(f"step {request.step}: {name}.max_replicas is {limits.max_replicas} (wants >= 1)")


def balance(loads: Sequence[float], bins: int) -> list[list[int]]:
    """Items to `bins` bins, largest load first into the least loaded bin; each bin's items in that order.

    No bin is empty when there are at least as many items as bins; with fewer items there are as many bins as items.
    """
    heap = [(0.0, 0, b) for b in range(min(bins, len(loads)))]
    shards: list[list[int]] = [[] for _ in heap]
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        load, count, b = heapq.heappop(heap)
        shards[b].append(item)
        heapq.heappush(heap, (load + loads[item], count + 1, b))
    return shards


MICRO_BATCH, CALLS = 32, 32
"""Finished samples that are handed on at a time, at least; and calls that hand on a step's samples, at most."""


class StaticPlanner:
    """Replicas as configured for the whole job; nothing is cut, nothing is learned but each prompt's last length.

    `keep_warm`: all functions stay up between steps (a reserved cluster); else all go to zero when they are idle.
    """

    def __init__(self, *, keep_warm: bool = False) -> None:
        self.keep_warm = keep_warm
        self.last_length: dict[int, float] = {}
        self.episodes = EpisodeModel()

    def plan(self, request: StepRequest) -> StepPlan:
        check(request)
        n = request.samples_per_prompt
        known = [self.last_length[p.prompt_id] for p in request.prompts if p.prompt_id in self.last_length]
        typical = statistics.fmean(known) if known else 1.0
        loads = [self.last_length.get(p.prompt_id, typical) for p in request.prompts]
        shards = balance(loads, request.functions[GENERATE].max_replicas)
        replicas = {name: limits.max_replicas for name, limits in request.functions.items()}
        if shards:
            replicas[GENERATE] = len(shards)
        return StepPlan(
            replicas=replicas,
            shards=[[row * n + index for row in shard for index in range(n)] for shard in shards],
            micro_batch=max(MICRO_BATCH, -(-len(request.prompts) * n // CALLS)),
            keep=frozenset(request.functions) - {TAIL} if self.keep_warm else frozenset(),
            waits=self.episodes.waits(),
        )

    def observe(self, observation: StepObservation) -> dict[str, float]:
        self.last_length |= mean_lengths(observation.lengths)
        self.episodes.observe(observation.waits)
        metrics = {"planner/step_s": observation.step_s, "planner/cost_usd": observation.cost_usd}
        return metrics | {f"planner/start_s/{name}": s for name, s in cold_starts(observation.calls).items()}

    def recall(self, past: PastStep, cap: int) -> None:
        self.last_length |= mean_lengths(past.by_prompt)
        self.episodes.observe(past.waits)


def mean_lengths(lengths: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """Mean response length by prompt_id; prompts without a sample are left out."""
    return {prompt_id: statistics.fmean(values) for prompt_id, values in lengths.items() if values}


def cold_starts(calls: Sequence[CallObservation]) -> dict[str, float]:
    """Mean seconds of a cold start, by function; only functions that had one."""
    seen: dict[str, list[float]] = {}
    for call in calls:
        if call.cold:
            seen.setdefault(call.function, []).append(call.start_s)
    return {name: statistics.fmean(values) for name, values in seen.items()}
