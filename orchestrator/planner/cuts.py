"""Which cuts of the tail are worth working out: each is judged by a first estimate of the step that it leads to."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from orchestrator.planner.arrays import Array, Numbers
from orchestrator.planner.base import GENERATE, TAIL
from orchestrator.planner.case import Case
from orchestrator.planner.scaling import worth
from orchestrator.planner.tail import Tail, TailChoice

WORKED_OUT = 3
"""Cuts whose tail goes on with the tail function, for each exchange."""


class Dealt:
    """One way to deal the samples, and what may become of its tail; each is worked out once."""

    def __init__(self, shards: Sequence[Sequence[int]], end: Tail, waits_s: Array | None = None) -> None:
        """`waits_s` [S]: for how long each sample waits for answers, beside its decoding."""
        self.shards, self.end, self.waits_s = shards, end, waits_s
        self._finished: dict[tuple[str, int, int], tuple[Array, Numbers]] = {}

    @cached_property
    def moved(self) -> list[TailChoice]:
        return self.end.moved()

    @cached_property
    def to_function(self) -> list[TailChoice]:
        return self.end.to_function()

    def finish(self, tail: TailChoice) -> tuple[Array, Numbers]:
        """When each sample is finished, ascending, and which it is. [S] each"""
        key = (tail.function, tail.cut_below, tail.migrate_to)
        if key not in self._finished:
            times, numbers = self.end.finish(tail)
            if self.waits_s is not None:
                times = times + self.waits_s[numbers]
                order = np.argsort(times, kind="stable")
                times, numbers = times[order], numbers[order]
            self._finished[key] = times, numbers
        return self._finished[key]

    def gone_s(self, tail: TailChoice) -> Array:
        """When each replica of generate is let go, ascending; seconds from the first call. [N]

        Episodes that wait for answers hold none: a replica goes as its share of the samples is finished.
        """
        if self.waits_s is not None:
            times, count = self.finish(tail)[0], len(self.shards)
            return np.array([times[-(-len(times) * k // count) - 1] for k in range(1, count + 1)])
        left = self.end.leftover(tail.cut_below)
        if left is None:
            return np.sort(self.end.ends)
        gone = np.sort(np.minimum(self.end.ends, left.gone_s))
        if tail.function != TAIL:
            gone[len(gone) - tail.migrate_to :] = tail.time_s
        return gone


class Cuts:
    def __init__(self, case: Case) -> None:
        self.case = case

    def of(self, dealt: Dealt) -> list[list[TailChoice]]:
        """What may become of the tail, the most promising first; for each of the case's exchanges."""
        policy, exchanges = self.case.policy, self.case.exchanges
        if policy.cut == "never":
            return [[dealt.end.uncut] for _ in exchanges]
        if policy.cut == "fixed":
            left = round(policy.cut_fraction * len(self.case.load.tokens))
            return [[dealt.end.at(left, self._saturation(dealt.end))] for _ in exchanges]
        choices = [*dealt.moved, *dealt.to_function]
        values, found = self._worth(choices, len(dealt.shards)), []
        for value in values:
            order = np.argsort(value, kind="stable").tolist()
            own = [k for k in order if k < len(dealt.moved)][:1]
            wide = [k for k in order if k >= len(dealt.moved)][:WORKED_OUT]
            found.append([choices[k] for k in order if k in own or k in wide])
        return found

    def _worth(self, choices: Sequence[TailChoice], shards: int) -> Array:
        """Of a first estimate of the steps that they lead to, for each exchange. [E, choices]"""
        costs, limits, after = self.case.costs, self.case.costs.limits, self.case.after
        exchange = np.array(self.case.exchanges)[:, None]
        hurries = self.case.hurries(exchange)
        time_s, replica_s, tail_s, begin_s, migrate_to = np.array(
            [(c.time_s, c.replica_s, c.tail_s, c.begin_s, c.migrate_to) for c in choices]
        ).T
        narrow_s = replica_s + costs.start_s[GENERATE] * shards
        cost, gpu_s = costs.price[GENERATE] * narrow_s, limits[GENERATE].gpus * narrow_s
        tail_gpus = np.zeros(len(choices))
        if TAIL in limits:
            cost, gpu_s = cost + costs.price[TAIL] * tail_s, gpu_s + limits[TAIL].gpus * tail_s
            tail_gpus = limits[TAIL].gpus * migrate_to * np.array([c.function == TAIL for c in choices])
        streamed_s = np.where(hurries, self._streamed_s(time_s, begin_s, tail_gpus, gpu_s, shards), 0.0)
        whole_s = np.maximum(time_s, streamed_s) + after.last_s(hurries)
        return worth(exchange, whole_s, cost + after.train_cost)

    def _streamed_s(
        self, time_s: Array, begin_s: Array, tail_gpus: Array, generate_gpu_s: Array, shards: int
    ) -> Array:  # fmt: skip
        """When streamed training is done: on the GPUs that are free from the start, from the cut on, or in the end."""
        case, after, pool = self.case, self.case.after, self.case.costs.pool_gpus
        if pool is None or case.policy.colocated or not case.streamed:
            return np.zeros(len(time_s))
        half_gpu_s = after.stream_shared_gpu_s / 2  # reading; writing is the other half
        narrow = shards * case.costs.limits[GENERATE].gpus
        beside = np.ceil(after.follow_gpu_s / np.maximum(time_s, 1e-9))
        found = time_s + (after.stream_gpu_s + 2 * half_gpu_s) / pool + after.stream_start_s
        later = (pool - tail_gpus, np.where(tail_gpus > 0, begin_s, time_s))
        for free, at_s in ((pool - np.maximum(narrow, tail_gpus), 0.0), later):
            ranks = np.maximum(free - beside, 1e-9)
            own_s = half_gpu_s / ranks
            ends_s = np.maximum(at_s + after.stream_start_s + own_s + after.stream_gpu_s / ranks, time_s) + own_s
            found = np.where(free > beside, np.minimum(found, ends_s), found)
        return np.maximum(found, (generate_gpu_s + after.follow_gpu_s + after.stream_gpu_s) / pool)

    def _saturation(self, end: Tail) -> int:
        """RLHFuse's BS_max: samples at which the batch makes a decode step a quarter slower than it is for one."""
        generate = self.case.costs.generate
        held = float(np.mean([(s.prompt_tokens + s.lengths).mean() for s in end.shards]))
        each_s = generate.sequence_s + generate.kv_token_s * held
        return max(1, min(end.max_batch, int(0.25 * generate.step_s / each_s))) if each_s else end.max_batch
