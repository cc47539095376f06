"""What flows between the stages of a step: references to samples and to what is said about them, as they come."""

import heapq
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from functions.base.wire import Event, Json, Ref, Version
from orchestrator.base.errors import CallFailed
from orchestrator.base.stream import Stream
from orchestrator.planner.base import CallObservation, Waits

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Finished:
    """A reference to finished (after a cut, unfinished) samples, and the little that is decided on."""

    ref: Ref
    group: Sequence[int]
    index: Sequence[int]
    length: Sequence[int]
    caches: Sequence[Ref] = ()
    """Of samples that were cut: their keys and values, as far as they were handed over."""

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(group, index) of each sample."""
        return list(zip(self.group, self.index, strict=True))

    @classmethod
    def of(cls, event: Event) -> Self:
        assert event.ref is not None, "samples and cut events carry a ref"
        caches = [Ref.from_json(ref) for sample in event.data.get("caches", ()) for ref in sample]
        return cls(event.ref, event.data["group"], event.data["index"], event.data["length"], caches)


def grouped(values: Iterable[tuple[int, int, N]]) -> dict[int, list[N]]:
    """(group, index, value) triples in any order to values by group, in the order of their index."""
    found: dict[int, list[N]] = {}
    for group, _, value in sorted(values):
        found.setdefault(group, []).append(value)
    return found


class Scores(Stream[Event]):
    """`done` events of a stage that says something about samples; their refs are Columns. `group` in their data: that
    of each sample, in any order."""

    async def refs(self) -> list[Ref]:
        return sorted((event.ref for event in await self.all() if event.ref is not None), key=lambda ref: ref.key)


class Samples(Stream[Finished]):
    """Finished samples as they come: `per_group` of each of `groups`."""

    def __init__(self, groups: range = range(0), per_group: int = 0) -> None:
        super().__init__()
        self.groups, self.per_group = groups, per_group
        self.environment = Scores()
        """What the job's environment says of them, where it has one: which failed, and what they scored."""

    async def refs(self) -> list[Ref]:
        return sorted((item.ref for item in await self.all()), key=lambda ref: ref.key)


@dataclass(frozen=True)
class StageTime:
    """When a stage was at work in the step, for metrics and the trace. Event-loop seconds."""

    name: str
    """verl's: gen, reward, ref, update_actor, ..."""
    function: str
    start_s: float
    stop_s: float


@dataclass
class StepReport:
    """What a step leaves behind."""

    trained: dict[str, Version] = field(default_factory=dict)
    """The versions that its train calls have published, by model."""
    durable: bool = True
    """Whether the state of all of them is in the store."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Of learning: a function of the job alone in the deterministic mode."""
    observed: dict[str, float] = field(default_factory=dict)
    """Of this execution."""
    lengths: dict[int, list[int]] = field(default_factory=dict)
    """Response lengths of the step's samples, by group."""
    waits: Mapping[str, Waits] = field(default_factory=dict)
    """What its episodes did, by environment."""
    stages: list[StageTime] = field(default_factory=list)
    calls: list[CallObservation] = field(default_factory=list)
    texts: list[Ref] = field(default_factory=list)
    validation_texts: list[Ref] = field(default_factory=list)
    mismatch: Ref | None = None
    """Columns: each sample's advantage, and how far the trainer's log-probabilities of it lie from the engine's."""
    failed: list[Json] = field(default_factory=list)
    tokens: int = 0
    """Prompt and response tokens of all samples."""


def lengths_of(finished: Iterable[Finished]) -> dict[int, list[int]]:
    """Response lengths by group, in the order of the samples' index."""
    return grouped((*key, n) for item in finished for key, n in zip(item.keys, item.length, strict=True))


async def micro_batches(samples: Samples, size: int, *, wait: bool) -> AsyncIterator[list[Finished]]:
    """Groups of finished items with at least `size` samples each, except the last; `wait`: until all are finished."""
    if wait:
        for even in even_batches(await samples.all(), size):
            yield even
        return
    batch: list[Finished] = []
    async for item in samples:
        batch.append(item)
        if sum(len(item.group) for item in batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def even_batches(items: Sequence[Finished], size: int) -> list[list[Finished]]:
    """As many groups as there are times `size` samples, alike in tokens: longest first, each to the lightest."""
    count = -(-sum(len(item.group) for item in items) // size)
    batches: list[list[Finished]] = [[] for _ in range(min(count, len(items)))]
    loads = [(0, k) for k in range(len(batches))]
    for item in sorted(items, key=lambda item: (-sum(item.length), item.ref.key)):
        load, k = heapq.heappop(loads)
        batches[k].append(item)
        heapq.heappush(loads, (load + sum(item.length), k))
    return batches


async def last(events: AsyncIterator[Event]) -> Event:
    """The `done` event of a call."""
    found: Event | None = None
    async for event in events:
        found = event
    if found is None or found.kind != "done":
        raise CallFailed("a call ended without its `done` event")
    return found
