"""When the tail of the step's generation is cut and moved together, so that the other replicas can go.

A replica's decode step costs `a` seconds however few samples are left in it. When no more than `cut_below` samples of
the step are unfinished they go on together on `migrate_to` replicas (RLHFuse, arXiv 2409.13221 section 4: below R_t, on
m = max(ceil(rem / BS_max), ceil(KV_rem / KV_cap)) instances; it finds R_t offline, near 20 % of the batch). The price:
the moved samples' keys and values are written and read (or computed again, where an engine cannot hand them over) and
each destination decodes more samples at a time. Both are in the latency model, so the threshold is chosen anew for each
step's lengths.

The tail may also go on with the tail function, whose replicas have more GPUs each (PAT, arXiv 2605.23945, changes the
parallelism of a running engine online): every decode step is faster, which is what the longest responses wait for. Its
replicas start for the tail alone, on GPUs that short shards have freed, and all replicas of `generate` go at the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.planner.arrays import Array, Numbers
from orchestrator.planner.base import GENERATE, TAIL
from orchestrator.planner.fusion import replica_counts
from orchestrator.planner.latency import GenerateCost, kv_token_steps
from orchestrator.planner.rollout import finish_times_s, queued

FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Shares of the step's samples that are compared as thresholds."""
TAIL_FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9)
"""The same of a tail that goes on with the tail function."""


@dataclass(frozen=True)
class ShardState:
    """A shard as it is expected to go: its samples as they finish, and when each does. [S] each"""

    prompt_tokens: Array
    lengths: Array
    finish_s: Array
    begin_s: float
    """End of its prefill."""
    numbers: Numbers
    """Of each sample in the step."""
    starts: Array
    """Decode steps of the shard before each is let in; 0: it has a slot from the beginning."""

    @property
    def steps(self) -> Array:
        """Of the shard, until each is done."""
        return self.starts + self.lengths

    @classmethod
    def of(
        cls, prompt_tokens: Array, lengths: Array, cost: GenerateCost, max_batch: int, prefill_tokens: float,
        numbers: Numbers | None = None,
    ) -> ShardState:  # fmt: skip
        """Samples in the order in which they take a slot. `numbers` None: 0, 1, ..."""
        named = np.arange(len(lengths)) if numbers is None else numbers
        if len(lengths) <= max_batch:
            return cls.together([prompt_tokens], [lengths], cost, max_batch, [prefill_tokens], [named])[0]
        starts, times = queued(prompt_tokens, lengths, cost, max_batch=max_batch, prefill_tokens=prefill_tokens)
        order = np.argsort(starts + lengths, kind="stable")
        begin_s = min(cost.call_s + cost.prefill_token_s * prefill_tokens, float(times.min()))
        finish_s = np.maximum.accumulate(times[order])
        return cls(prompt_tokens[order], lengths[order], finish_s, begin_s, named[order], starts[order])

    @classmethod
    def together(
        cls, prompt_tokens: Sequence[Array], lengths: Sequence[Array], cost: GenerateCost, max_batch: int,
        prefill_tokens: Sequence[float], numbers: Sequence[Numbers],
    ) -> list[ShardState]:  # fmt: skip
        """Of several shards, none of which has more samples than slots."""
        sizes = np.array([len(shard) for shard in numbers])
        firsts = sizes.max() - sizes
        there = np.arange(sizes.max()) >= firsts[:, None]

        def table(values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
            found = np.zeros(there.shape, values[0].dtype)
            found[there] = np.concatenate(values)
            return found

        order = np.argsort(table(lengths), axis=1, kind="stable")
        prompts, tokens, named = (
            np.take_along_axis(table(values), order, axis=1) for values in (prompt_tokens, lengths, numbers)
        )
        finish_s = finish_times_s(prompts, tokens, cost, max_batch=max_batch, prefill_tokens=np.array(prefill_tokens))
        finish_s = np.maximum.accumulate(finish_s, axis=1)  # ascending also where equal lengths differ by rounding
        begin_s = [cost.call_s + cost.prefill_token_s * computed for computed in prefill_tokens]
        return [
            cls(prompts[k, at:], tokens[k, at:], finish_s[k, at:], begin_s[k], named[k, at:], np.zeros(sizes[k]))
            for k, at in enumerate(firsts.tolist())
        ]


@dataclass(frozen=True)
class TailFunction:
    """The second function, with more GPUs to a replica."""

    cost: GenerateCost
    """For samples that were cut."""
    max_batch: int
    kv_tokens: int | None
    start_s: float
    most: int
    """Replicas."""
    gpus: int
    narrow_gpus: int
    """Of a replica of `generate`."""
    pool_gpus: int | None
    """That both share; None: each has its own."""

    def room_at_s(self, replicas: int, gone_s: Array) -> float:
        """When so many find room beside the replicas of `generate`, which are gone at `gone_s`, ascending."""
        if self.pool_gpus is None:
            return 0.0
        missing = replicas * self.gpus - (self.pool_gpus - len(gone_s) * self.narrow_gpus)
        return float(gone_s[-(-missing // self.narrow_gpus) - 1]) if missing > 0 else 0.0


@dataclass(frozen=True)
class _Flat:
    """The samples of all shards, shard after shard. [S] but for the offsets"""

    begins: Numbers
    """Of each shard."""
    sizes: Numbers
    prompt_tokens: Array
    lengths: Array
    finish_s: Array
    numbers: Numbers
    starts: Array
    steps: Array
    before_s: Array
    """The finish of the sample before it in its shard, or the shard's begin."""
    before: Array
    """That sample's last step, or 0."""

    @classmethod
    def of(cls, shards: Sequence[ShardState]) -> _Flat:
        columns = [(s.prompt_tokens, s.lengths, s.finish_s, s.numbers, s.starts, s.steps) for s in shards]
        prompt_tokens, lengths, finish_s, numbers, starts, steps = (
            np.concatenate(column) for column in zip(*columns, strict=True)
        )
        sizes = np.array([len(s.lengths) for s in shards])
        begins = np.cumsum(sizes) - sizes
        before_s, before = np.roll(finish_s, 1), np.roll(steps, 1)
        before_s[begins], before[begins] = [s.begin_s for s in shards], 0.0
        return cls(begins, sizes, prompt_tokens, lengths, finish_s, numbers, starts, steps, before_s, before)

    def left_at(self, time_s: float) -> tuple[Array, Array, Numbers]:
        """Of the samples unfinished then: tokens held (prompt and response so far), tokens to come, numbers.

        Progress is linear between finishes.
        """
        left = self.finish_s > time_s
        counts = np.add.reduceat(left, self.begins, dtype=np.int64)
        first = (self.begins + self.sizes - counts)[counts > 0]
        share = (time_s - self.before_s[first]) / np.maximum(self.finish_s[first] - self.before_s[first], 1e-12)
        done = self.before[first] + np.maximum(0.0, share) * (self.steps[first] - self.before[first])
        made = np.maximum(0.0, np.repeat(done, counts[counts > 0]) - self.starts[left])
        return self.prompt_tokens[left] + made, self.lengths[left] - made, self.numbers[left]


@dataclass(frozen=True)
class TailChoice:
    """Generation with this cut takes `time_s` from the first call and `replica_s` on all of its replicas together."""

    cut_below: int
    migrate_to: int
    time_s: float
    replica_s: float
    function: str = GENERATE
    """That the tail goes on with. Of another than `generate`:"""
    open_s: float = 0.0
    """when its replicas are asked for, in seconds from the first call,"""
    begin_s: float = 0.0
    """get their calls,"""
    ends_s: Sequence[float] = ()
    """and go."""

    @property
    def tail_s(self) -> float:
        """Replica-seconds of the tail function."""
        return sum(self.ends_s) - self.open_s * len(self.ends_s)


@dataclass(frozen=True)
class Leftover:
    """What a cut leaves to be moved: tokens held and to come of each sample, most to come first. [samples]"""

    at_s: float
    gone_s: float
    """When the replicas have written what is moved."""
    open_shards: int
    held: Array
    more: Array
    numbers: Numbers
    stopped_s: float
    """Replica-seconds until then, of all shards."""


def remaining_instances(unfinished: int, held_tokens: float, max_batch: int, kv_tokens: int | None) -> int:
    """RLHFuse's m: replicas that the unfinished samples need, by slots and by keys and values."""
    if unfinished == 0:
        return 0
    by_kv = 0 if kv_tokens is None else -(-int(held_tokens) // kv_tokens)
    return max(1, -(-unfinished // max_batch), by_kv)


class Tail:
    """The end of one generation, and what cutting it at different points leads to."""

    def __init__(
        self, shards: Sequence[ShardState], cost: GenerateCost, *, max_batch: int, kv_tokens: int | None,
        function: TailFunction | None = None,
    ) -> None:  # fmt: skip
        self.shards, self.cost, self.function = shards, cost, function
        self.max_batch, self.kv_tokens = max_batch, kv_tokens
        self._moved = cost.moved
        self._flat = _Flat.of(shards)
        self.ends = np.array([s.finish_s[-1] for s in shards])
        self.every = np.sort(self._flat.finish_s)
        self.uncut = TailChoice(0, 1, float(self.ends.max()), float(self.ends.sum()))
        self._left: dict[int, Leftover | None] = {}
        self._linears_s: dict[int, Array] = {}

    def leftover(self, cut_below: int) -> Leftover | None:
        """None when nothing is left to cut: no threshold, or all of the last ones end at once."""
        if cut_below not in self._left:
            self._left[cut_below] = self._leftover(cut_below)
        return self._left[cut_below]

    def _leftover(self, cut_below: int) -> Leftover | None:
        if not 0 < cut_below < len(self.every):
            return None
        at_s = float(self.every[-cut_below - 1])
        open_shards = int(np.count_nonzero(self.ends > at_s))
        if not open_shards:
            return None
        held, more, numbers = self._flat.left_at(at_s)
        order = np.argsort(-more, kind="stable")
        gone_s = at_s + (self.cost.moved_token_s or 0.0) * float(held.sum()) / open_shards
        stopped_s = float(np.minimum(self.ends, gone_s).sum())
        return Leftover(at_s, gone_s, open_shards, held[order], more[order], numbers[order].astype(np.int64), stopped_s)

    def needed(self, left: Leftover, batch: int | None = None) -> int:
        """`batch`: samples to a replica; None: as many as it has slots."""
        tokens = float((left.held + left.more).sum())
        return remaining_instances(len(left.more), tokens, batch or self.max_batch, self.kv_tokens)

    def move(self, cut_below: int, left: Leftover, replicas: int) -> TailChoice:
        """The leftover dealt to `replicas` replicas, one call each."""
        works = _works_s(left, self._linear_s(cut_below, left), replicas, self._moved, self.max_batch)
        return TailChoice(
            cut_below, replicas, left.gone_s + float(works.max()), left.stopped_s + float(works.sum())
        )  # fmt: skip

    def _linear_s(self, cut_below: int, left: Leftover) -> Array:
        if cut_below not in self._linears_s:
            self._linears_s[cut_below] = _linear_s(left, self._moved)
        return self._linears_s[cut_below]

    def at(self, cut_below: int, batch: int | None = None) -> TailChoice:
        """A cut at `cut_below`, to as few replicas as are needed at `batch` samples each; no cut if that frees none."""
        left = self.leftover(cut_below)
        if left is None or self.needed(left, batch) >= left.open_shards:
            return self.uncut
        return self.move(cut_below, left, self.needed(left, batch))

    def moved(self, fractions: Sequence[float] = FRACTIONS) -> list[TailChoice]:
        """No cut, and every cut whose tail goes on with replicas of `generate`."""
        found = [self.uncut]
        for cut_below in sorted({max(1, round(len(self.every) * fraction)) for fraction in fractions}):
            left = self.leftover(cut_below)
            if left is None:
                continue
            low = self.needed(left)
            for replicas in sorted({low, 2 * low, 4 * low, left.open_shards // 4}):
                if low <= replicas < left.open_shards:
                    found.append(self.move(cut_below, left, replicas))
        return found

    def to_function(self, fractions: Sequence[float] = TAIL_FRACTIONS) -> list[TailChoice]:
        """Every cut whose tail goes on with the tail function, on numbers of replicas that there is room for.

        Its replicas are started ahead, so that they are up when the cut comes where there is room before.
        """
        found: list[TailChoice] = []
        if (own := self.function) is None:
            return found
        for cut_below in sorted({max(1, round(len(self.every) * fraction)) for fraction in fractions}):
            left = self.leftover(cut_below)
            if left is None:
                continue
            gone_s = np.sort(np.minimum(self.ends, left.gone_s))
            linear_s = _linear_s(left, own.cost)
            tokens = float((left.held + left.more).sum())
            low = remaining_instances(len(left.more), tokens, own.max_batch, own.kv_tokens)
            most = min(own.most, len(left.more))
            for replicas in sorted({low, *replica_counts(most)} if low <= most else ()):
                if replicas < low:
                    continue
                works = _works_s(left, linear_s, replicas, own.cost, own.max_batch)
                open_s = max(own.room_at_s(replicas, gone_s), left.gone_s - own.start_s, 0.0)
                begin_s = max(left.gone_s, open_s + own.start_s)
                ends_s = (begin_s + works).tolist()
                found.append(
                    TailChoice(
                        cut_below, replicas, max(ends_s), left.stopped_s, TAIL, open_s, begin_s, tuple(ends_s)
                    )
                )  # fmt: skip
        return found

    def finish(self, choice: TailChoice) -> tuple[Array, Numbers]:
        """When each sample is finished under that choice, ascending, and which it is. [samples] each"""
        times, numbers = self._flat.finish_s, self._flat.numbers
        left = self.leftover(choice.cut_below)
        if left is not None:
            stays = times <= left.at_s
            moved, named = [times[stays]], [numbers[stays]]
            begin_s, cost, max_batch = left.gone_s, self._moved, self.max_batch
            if choice.function == TAIL and self.function is not None:
                begin_s, cost, max_batch = choice.begin_s, self.function.cost, self.function.max_batch
            held, more = (_dealt(tokens, choice.migrate_to)[::-1].T for tokens in (left.held, left.more))
            own = finish_times_s(held, more, cost, max_batch=max_batch, prefill_tokens=held.sum(axis=1))
            moved.append(begin_s + own.T[::-1].ravel()[: len(left.more)])
            named.append(left.numbers)
            times, numbers = np.concatenate(moved), np.concatenate(named)
        order = np.argsort(times, kind="stable")
        return times[order], numbers[order]


def _linear_s(left: Leftover, cost: GenerateCost) -> Array:
    """Seconds that each sample adds to its replica's call, the decode steps aside. [samples]"""
    linear_s: Array = cost.prefill_token_s * left.held + cost.sequence_s * left.more
    return linear_s + cost.kv_token_s * kv_token_steps(left.held, left.more)


def _dealt(values: Array, replicas: int) -> Array:
    """Of samples that are dealt to replicas in turn; zeros follow. [rounds, replicas]"""
    rounds = -(-len(values) // replicas)
    found = np.zeros(rounds * replicas)
    found[: len(values)] = values
    return found.reshape(rounds, replicas)


def _works_s(left: Leftover, linear_s: Array, replicas: int, cost: GenerateCost, max_batch: int) -> Array:
    """Of each of `replicas` replicas that the leftover is dealt to in turn, most to come first. [replicas]"""
    steps = left.more[:replicas]
    if len(left.more) > replicas * max_batch:  # else none takes more steps than its first sample
        steps = np.maximum(steps, _dealt(left.more, replicas).sum(axis=0) / max_batch)
    works: Array = _dealt(linear_s, replicas).sum(axis=0)
    return works + (cost.call_s + cost.step_s * steps)
