"""When the tail of the step's generation is cut and moved together, so that the other replicas can go.

A replica's decode step costs `a` seconds however few samples are left in it. When no more than `cut_below` samples of
the step are unfinished they go on together on `migrate_to` replicas (RLHFuse, arXiv 2409.13221 section 4: below R_t, on
m = max(ceil(rem / BS_max), ceil(KV_rem / KV_cap)) instances; it finds R_t offline, near 20 % of the batch). The price:
the moved samples' keys and values are computed again (prefill of prompt and tokens so far) and each destination decodes
more samples at a time. Both are in the latency model, so the threshold is chosen anew for each step's lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.planner.latency import GenerateCost, kv_token_steps
from orchestrator.planner.rollout import finish_times_s

Array = npt.NDArray[np.float64]
FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Shares of the step's samples that are compared as thresholds."""


@dataclass(frozen=True)
class ShardState:
    """A shard as it is expected to go: its samples by length, ascending, and when each finishes. [S] each"""

    prompt_tokens: Array
    lengths: Array
    finish_s: Array
    begin_s: float
    """End of its prefill."""
    numbers: npt.NDArray[np.int64]
    """Of each sample in the step."""

    @classmethod
    def of(
        cls, prompt_tokens: Array, lengths: Array, cost: GenerateCost, max_batch: int, prefill_tokens: float,
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> ShardState:  # fmt: skip
        """`numbers` None: 0, 1, ..."""
        named = np.arange(len(lengths)) if numbers is None else numbers
        order = np.argsort(lengths, kind="stable")
        prompt, length = prompt_tokens[order], lengths[order]
        finish_s = finish_times_s(prompt, length, cost, max_batch=max_batch, prefill_tokens=prefill_tokens)
        finish_s = np.maximum.accumulate(finish_s)  # ascending also where equal lengths differ by rounding
        return cls(prompt, length, finish_s, cost.call_s + cost.prefill_token_s * prefill_tokens, named[order])

    def left_at(self, time_s: float) -> tuple[Array, Array, npt.NDArray[np.int64]]:
        """Of the samples unfinished then: tokens held (prompt and response so far), tokens to come, numbers.

        Progress is linear between finishes.
        """
        first = int(np.searchsorted(self.finish_s, time_s, side="right"))
        before_s = self.finish_s[first - 1] if first else self.begin_s
        before = self.lengths[first - 1] if first else 0.0
        share = (time_s - before_s) / max(self.finish_s[first] - before_s, 1e-12)
        done = before + max(0.0, share) * (self.lengths[first] - before)
        return self.prompt_tokens[first:] + done, self.lengths[first:] - done, self.numbers[first:]


@dataclass(frozen=True)
class TailChoice:
    """Generation with this cut takes `time_s` from the first call and `replica_s` on all replicas together."""

    cut_below: int
    migrate_to: int
    time_s: float
    replica_s: float


Value = Callable[[TailChoice], tuple[float, float]]
"""What is minimised."""


@dataclass(frozen=True)
class Leftover:
    """What a cut leaves to be moved: tokens held and to come of each sample, most to come first. [samples]"""

    at_s: float
    open_shards: int
    held: Array
    more: Array
    numbers: npt.NDArray[np.int64]
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
        self, shards: Sequence[ShardState], cost: GenerateCost, *, max_batch: int, kv_tokens: int | None
    ) -> None:
        self.shards, self.cost, self.max_batch, self.kv_tokens = shards, cost, max_batch, kv_tokens
        self.ends = np.array([s.finish_s[-1] for s in shards])
        self.every = np.sort(np.concatenate([s.finish_s for s in shards]))
        self.uncut = TailChoice(0, 1, float(self.ends.max()), float(self.ends.sum()))
        self._left: dict[int, Leftover | None] = {}

    def leftover(self, cut_below: int) -> Leftover | None:
        """None when nothing is left to cut: no threshold, or all of the last ones end at once."""
        if cut_below not in self._left:
            self._left[cut_below] = self._leftover(cut_below)
        return self._left[cut_below]

    def _leftover(self, cut_below: int) -> Leftover | None:
        if not 0 < cut_below < len(self.every):
            return None
        at_s = float(self.every[-cut_below - 1])
        parts = [s.left_at(at_s) for s, end in zip(self.shards, self.ends, strict=True) if end > at_s]
        if not parts:
            return None
        held, more, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(-more, kind="stable")
        stopped_s = float(np.minimum(self.ends, at_s).sum())
        return Leftover(at_s, len(parts), held[order], more[order], numbers[order].astype(np.int64), stopped_s)

    def needed(self, left: Leftover, batch: int | None = None) -> int:
        """`batch`: samples to a replica; None: as many as it has slots."""
        tokens = float((left.held + left.more).sum())
        return remaining_instances(len(left.more), tokens, batch or self.max_batch, self.kv_tokens)

    def move(self, cut_below: int, left: Leftover, replicas: int) -> TailChoice:
        """The leftover dealt to `replicas` replicas, one call each."""
        works = []
        for k in range(replicas):
            held, more = left.held[k::replicas], left.more[k::replicas]
            tokens = float(more.sum())
            steps = max(float(more[0]), tokens / self.max_batch)
            works.append(self.cost.work_s(float(held.sum()), steps, tokens, float(kv_token_steps(held, more).sum())))
        return TailChoice(cut_below, replicas, left.at_s + max(works), left.stopped_s + sum(works))

    def at(self, cut_below: int, batch: int | None = None) -> TailChoice:
        """A cut at `cut_below`, to as few replicas as are needed at `batch` samples each; no cut if that frees none."""
        left = self.leftover(cut_below)
        if left is None or self.needed(left, batch) >= left.open_shards:
            return self.uncut
        return self.move(cut_below, left, self.needed(left, batch))

    def best(self, value: Value, fractions: Sequence[float] = FRACTIONS) -> TailChoice:
        """The cut with the least `value`; no cut when none is better. Ties go to the smaller threshold."""
        best = self.uncut
        for cut_below in sorted({max(1, round(len(self.every) * fraction)) for fraction in fractions}):
            left = self.leftover(cut_below)
            if left is None:
                continue
            low = self.needed(left)
            for replicas in sorted({low, 2 * low, 4 * low, left.open_shards // 4}):
                if low <= replicas < left.open_shards:
                    choice = self.move(cut_below, left, replicas)
                    best = choice if value(choice) < value(best) else best
        return best

    def finish(self, choice: TailChoice) -> tuple[Array, npt.NDArray[np.int64]]:
        """When each sample is finished under that choice, ascending, and which it is. [samples] each"""
        times = np.concatenate([s.finish_s for s in self.shards])
        numbers = np.concatenate([s.numbers for s in self.shards])
        left = self.leftover(choice.cut_below)
        if left is not None:
            stays = times <= left.at_s
            moved, named = [times[stays]], [numbers[stays]]
            for k in range(choice.migrate_to):
                held, more = left.held[k :: choice.migrate_to][::-1], left.more[k :: choice.migrate_to][::-1]
                prefill = float(held.sum())
                own = finish_times_s(held, more, self.cost, max_batch=self.max_batch, prefill_tokens=prefill)
                moved.append(left.at_s + own)
                named.append(left.numbers[k :: choice.migrate_to][::-1])
            times, numbers = np.concatenate(moved), np.concatenate(named)
        order = np.argsort(times, kind="stable")
        return times[order], numbers[order]

    def finish_s(self, choice: TailChoice) -> Array:
        """When each sample is finished under that choice, ascending. [samples]"""
        return self.finish(choice)[0]
