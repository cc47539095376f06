"""Samples that come while the step is being made: a `train` call that starts before generation has ended.

    orchestrator  puts <prefix>000000, 000001, ... (FeedPart), each with whole prompt groups and all their columns
    train         waits for the next one, adds its gradient, ...                            (streamed.py)
    the last      says `identity`: the id that a call with all samples as inputs would have; the version is named by it

A feed has one writer (its prefix names the orchestrator's epoch) and never changes: a repeated attempt, and every rank
of a gang, reads the same parts.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import FeedPart
from functions.call.function import Context, FatalError
from functions.call.inputs import without
from functions.call.params import parse
from functions.exchange.base import NotFound
from functions.train.gang import Ranks
from functions.train.protocols import Inputs

LOOK_S = 1.0
"""How often a waiting call looks whether it is still wanted."""


@dataclass(frozen=True, kw_only=True)
class FeedParams:
    """`feed` in a call's params."""

    prefix: str
    """Of the parts' keys, ending in a slash."""
    stream: bool
    """Gradients begin with the first part (TrainParams.streams); else with the last: what is saved is the loading."""


@dataclass
class Feed:
    """The parts of one feed, as they come."""

    prefix: str
    stream: bool
    context: Context
    read: list[FeedPart] = field(default_factory=list)
    waited_s: float = 0.0
    """For parts to come."""

    @classmethod
    def of(cls, params: Mapping[str, Any], context: Context) -> Self | None:
        """None for a call that brings its samples as inputs. Raises FatalError naming the key."""
        if "feed" not in params:
            return None
        found = parse(FeedParams, params["feed"], "params.feed")
        return cls(found.prefix, found.stream, context)

    def identity(self) -> str | None:
        """What the version is named after; None while the last part is not there. Does not wait."""
        return self.read[-1].identity if self._look(0) else None

    def batches(self, ranks: Ranks) -> Iterator[list[FeedPart]]:
        """All parts, from the first, each time as many as every rank sees; waits for those to come.

        A trainer that lags behind so makes few large batches, one that waits goes on with the first part that comes.
        Raises Cancelled when the call should end.
        """
        done = 0
        while not (done and self.read[done - 1].identity):
            begin_s = time.monotonic()
            while not self._look(done):
                self.context.exchange.wait(self._key(), LOOK_S)
                self.context.check()
            self.waited_s += time.monotonic() - begin_s
            until = min(seen["parts"] for seen in ranks.gather({"parts": len(self.read)}))
            yield self.read[done:until]
            done = until

    def _look(self, done: int) -> bool:
        """Whether there is more than `done`, after all that is there was read."""
        while not (self.read and self.read[-1].identity) and self._next():
            pass
        return len(self.read) > done

    def _key(self) -> str:
        return f"{self.prefix}{len(self.read):06d}"

    def _next(self) -> bool:
        try:
            self.read.append(FeedPart.from_json(json.loads(self.context.exchange.get(self._key()))))
        except NotFound:
            return False
        return True


class Intake:
    """Joins what the parts bring to samples and columns of whole groups."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._samples: list[SampleBatch] = []
        self._columns: list[Columns] = []
        self._waiting: list[SampleBatch] = []
        self._taken: set[int] = set()
        self._dropped: set[tuple[int, int]] = set()

    def take(self, parts: Sequence[FeedPart]) -> tuple[SampleBatch, Columns] | None:
        """The samples of the parts' groups, sorted, without the dropped; None when no group is whole.

        Raises FatalError for a group that is given twice, WireError for a sample that a column lacks.
        """
        found, columns = self._inputs.read(
            [ref for part in parts for ref in part.samples], [ref for part in parts for ref in part.columns]
        )
        self._samples += found
        self._columns += columns
        groups = set[int]()
        for part in parts:
            self._dropped |= set(part.dropped)
            if again := (self._taken | groups) & set(part.groups):
                raise FatalError(f"feed: group {min(again)} is given twice")
            groups |= set(part.groups)
        self._taken |= groups
        if not groups:
            self._waiting += found
            return None
        every = SampleBatch.concat(self._waiting + found)
        here = np.isin(every.group, sorted(groups))
        self._waiting = [every.select(np.flatnonzero(~here))]
        return self._joined(every.select(np.flatnonzero(here)).in_order())

    def whole(self) -> tuple[SampleBatch, Columns]:
        """Everything that was taken. Raises FatalError for samples whose group never came."""
        left = sorted({group for batch in self._waiting for group in batch.group.tolist()} - self._taken)
        if left:
            raise FatalError(
                f"feed: ended without group {left[0]} ({len(left)} groups have samples and were not named)"
            )
        return self._joined(SampleBatch.concat(self._samples).in_order())

    def _joined(self, batch: SampleBatch) -> tuple[SampleBatch, Columns]:
        batch = without(batch, self._dropped)
        return batch, Columns.align(batch, self._columns)
