"""Which cuts of the tail are worth working out: each is judged by a first estimate of the step that it leads to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from orchestrator.planner.base import GENERATE, TAIL
from orchestrator.planner.costs import Costs
from orchestrator.planner.policies import Policy
from orchestrator.planner.scaling import Goal
from orchestrator.planner.tail import Tail, TailChoice

Array = npt.NDArray[np.float64]

WORKED_OUT = 6
"""Cuts whose tail goes on with the second function."""


class Dealt:
    """One way to deal the samples, and what may become of its tail; each is worked out once."""

    def __init__(self, shards: Sequence[Sequence[int]], end: Tail) -> None:
        self.shards, self.end = shards, end
        self._finished: dict[tuple[str, int, int], tuple[Array, npt.NDArray[np.int64]]] = {}

    @cached_property
    def moved(self) -> list[TailChoice]:
        return self.end.moved()

    @cached_property
    def widened(self) -> list[TailChoice]:
        return self.end.widened()

    def finish(self, tail: TailChoice) -> tuple[Array, npt.NDArray[np.int64]]:
        """When each sample is finished, ascending, and which it is. [S] each"""
        key = (tail.function, tail.cut_below, tail.migrate_to)
        if key not in self._finished:
            self._finished[key] = self.end.finish(tail)
        return self._finished[key]

    def gone_s(self, tail: TailChoice) -> Array:
        """When each replica of generate is let go, ascending; seconds from the first call. [N]"""
        left = self.end.leftover(tail.cut_below)
        if left is None:
            return np.sort(self.end.ends)
        gone = np.sort(np.minimum(self.end.ends, left.gone_s))
        if tail.function != TAIL:
            gone[len(gone) - tail.migrate_to :] = tail.time_s
        return gone


class Cuts:
    """`samples` of so many `tokens` [S], prompts included; `fed`: train functions that work while samples come."""

    def __init__(
        self, costs: Costs, policy: Policy, goal: Goal, samples: int, lengths: Array, fed: frozenset[str]
    ) -> None:
        self.costs, self.policy, self.goal, self.samples, self.fed = costs, policy, goal, samples, fed
        tokens, limits = samples * float(lengths.mean()), costs.limits
        whole_s = {
            name: cost.ranked_s(samples, tokens, limits[name].max_replicas) for name, cost in costs.trainers.items()
        }
        after = [seconds for name, seconds in whole_s.items() if name not in fed]
        self.last_s = sum(after) if policy.colocated else max(after, default=0.0)
        """Of training that begins when all samples are there."""
        self.rest = sum(
            costs.price[name] * limits[name].max_replicas * (seconds + costs.start_s[name])
            for name, seconds in whole_s.items()
        )
        """What all training costs."""
        self.follow_gpu_s = sum(limits[f].gpus * c.work_s(samples, tokens) for f, c in costs.followers.items())
        feeds = [(limits[f].gpus, costs.trainers[f]) for f in fed if f in costs.trainers]
        self.fed_gpu_s = sum(gpus * (cost.work_s(samples, tokens) - cost.call_s) for gpus, cost in feeds)
        self.fed_own_gpu_s = sum(gpus * cost.shared_s / 2 for gpus, cost in feeds)
        starts = [costs.start_s[f] + costs.trainers[f].call_s for f in fed if f in costs.trainers]
        self.fed_start_s = max(starts, default=0.0)

    def of(self, dealt: Dealt) -> list[TailChoice]:
        """What may become of the tail, the most promising first."""
        if self.policy.cut == "never":
            return [dealt.end.uncut]
        if self.policy.cut == "fixed":
            return [dealt.end.at(round(self.policy.cut_fraction * self.samples), self._saturation(dealt.end))]
        moved, wide = self._sorted(dealt.moved, dealt), self._sorted(dealt.widened, dealt)
        return self._sorted([*moved[:1], *wide[:WORKED_OUT]], dealt)

    def _sorted(self, choices: Sequence[TailChoice], dealt: Dealt) -> list[TailChoice]:
        """By a first estimate of the steps that they lead to."""
        if len(choices) < 2:
            return [*choices]
        costs, limits, shards = self.costs, self.costs.limits, len(dealt.shards)
        time_s, replica_s, wide_s, begin_s, migrate_to = np.array(
            [(c.time_s, c.replica_s, c.wide_s, c.begin_s, c.migrate_to) for c in choices]
        ).T
        narrow_s = replica_s + costs.start_s[GENERATE] * shards
        cost, gpu_s = costs.price[GENERATE] * narrow_s, limits[GENERATE].gpus * narrow_s
        wide_gpus = np.zeros(len(choices))
        if TAIL in limits:
            cost, gpu_s = cost + costs.price[TAIL] * wide_s, gpu_s + limits[TAIL].gpus * wide_s
            wide_gpus = limits[TAIL].gpus * migrate_to * np.array([c.function == TAIL for c in choices])
        fed_s = self._fed_s(time_s, begin_s, wide_gpus, gpu_s, shards)
        first, second = self.goal.rank(np.maximum(time_s, fed_s) + self.last_s, cost + self.rest)
        return [choices[k] for k in np.lexsort((second, first)).tolist()]

    def _fed_s(self, time_s: Array, begin_s: Array, wide_gpus: Array, generate_gpu_s: Array, shards: int) -> Array:
        """When what is fed is done: on the GPUs that are free from the start, from the cut on, or in the end."""
        pool = self.costs.pool_gpus
        if pool is None or self.policy.colocated or not self.fed:
            return np.zeros(len(time_s))
        narrow = shards * self.costs.limits[GENERATE].gpus
        beside = np.ceil(self.follow_gpu_s / np.maximum(time_s, 1e-9))
        found = time_s + (self.fed_gpu_s + 2 * self.fed_own_gpu_s) / pool + self.fed_start_s
        after = (pool - wide_gpus, np.where(wide_gpus > 0, begin_s, time_s))
        for free, at_s in ((pool - np.maximum(narrow, wide_gpus), 0.0), after):
            ranks = np.maximum(free - beside, 1e-9)
            own_s = self.fed_own_gpu_s / ranks
            ends_s = np.maximum(at_s + self.fed_start_s + own_s + self.fed_gpu_s / ranks, time_s) + own_s
            found = np.where(free > beside, np.minimum(found, ends_s), found)
        least: Array = np.maximum(found, (generate_gpu_s + self.follow_gpu_s + self.fed_gpu_s) / pool)
        return least

    def _saturation(self, end: Tail) -> int:
        """RLHFuse's BS_max: samples at which the batch makes a decode step a quarter slower than it is for one."""
        generate = self.costs.generate
        held = float(np.mean([(s.prompt_tokens + s.lengths).mean() for s in end.shards]))
        each_s = generate.sequence_s + generate.kv_token_s * held
        return max(1, min(end.max_batch, int(0.25 * generate.step_s / each_s))) if each_s else end.max_batch
