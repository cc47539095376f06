"""The calls of one generation: a call for each shard, and the tail's migration.

    replicas of generate   shard 0 ----------#         # cut: few samples are left
                           shard 1 ------------#
    replicas of the tail                         what was left of both -------------- done
The tail's replicas are `migrate_to` of those that generate already, or of another function, with more GPUs each. The
keys and values of what is left go with it, through the exchange, and are deleted when the calls that read them have
ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from functions.base.wire import Call, Ref
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Stage
from orchestrator.calls.invoke import ask_cut
from orchestrator.step.dataflow import Finished, Samples


@dataclass(frozen=True)
class Shard:
    """What a call is to generate, or to go on with."""

    samples: Sequence[Ref]
    caches: Sequence[Ref] = ()

    @property
    def inputs(self) -> dict[str, Sequence[Ref]]:
        return {"samples": self.samples} | ({"caches": self.caches} if self.caches else {})


@dataclass
class Rollout:
    """The calls of one generation, and when its tail is cut."""

    call: Callable[[str, Shard], Call]
    """Makes the call of a function for a shard."""
    store: AsyncExchange
    caches: str
    """Prefix of the keys and values that its calls hand over."""
    unfinished: int
    cut_below: int
    migrate_to: int
    tail_function: bool = False
    """What is left goes on at another function: none of these replicas stays, and a single open call is cut too."""
    scaled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more replicas will be asked for: of the tail's function, where it has one."""
    finished: list[Finished] = field(default_factory=list)
    _cut: bool = False
    _handed_over: bool = False
    """Whether a call was cut, by us or because its replica was told to stop."""
    _open: list[Call] = field(default_factory=list)

    @property
    def response_tokens(self) -> int:
        return sum(sum(item.length) for item in self.finished)

    async def run(self, stage: Stage, shards: Sequence[Shard], samples: Samples) -> list[Finished]:
        """One call a shard, side by side; returns what a cut left unfinished."""
        leftovers: list[Finished] = []
        stays = self.cut_below and not self._cut and not self.tail_function
        stage.expect(len(shards), then=self.migrate_to if stays else 0)
        async with asyncio.TaskGroup() as calls:
            for shard in shards:
                calls.create_task(self._shard(stage, shard, samples, leftovers))
            await asyncio.sleep(0)
            await stage.no_more()
            if not self.tail_function or self._cut:
                self.scaled.set()
        return leftovers

    async def free(self) -> None:
        """Deletes the keys and values that a cut has handed over, and those of attempts at it that died."""
        if self._cut or self._handed_over:
            await self.store.delete(self.caches)

    async def _shard(self, stage: Stage, shard: Shard, samples: Samples, leftovers: list[Finished]) -> None:
        call = self.call(stage.function, shard)
        self._open.append(call)
        try:
            async for event in stage.call(call):
                if event.kind == "samples":
                    finished = Finished.of(event)
                    self.unfinished -= len(finished.group)
                    self.finished.append(finished)
                    samples.put(finished)
                    await self._cut_tail()
                elif event.kind == "cut" and event.ref is not None:
                    self._handed_over = True
                    leftovers.append(Finished.of(event))
        finally:
            self._open.remove(call)

    async def _cut_tail(self) -> None:
        """Asks all open calls for their unfinished samples, once, when few enough are left to be the tail."""
        too_many = len(self._open) > (0 if self.tail_function else self.migrate_to)
        if not self._cut and 0 < self.unfinished <= self.cut_below and too_many:
            self._cut = True
            for call in list(self._open):
                await ask_cut(self.store, call)


def deal(prompts: int, n: int, replicas: int) -> list[list[int]]:
    """Samples of `prompts` prompts to `replicas` shards, a prompt's samples together."""
    return [[row * n + k for row in range(first, prompts, replicas) for k in range(n)] for first in range(replicas)]


def regroup(leftovers: Sequence[Finished], calls: int) -> list[Shard]:
    """What was cut to `calls` calls, the fullest part first to the emptiest call."""
    shards: list[list[Finished]] = [[] for _ in range(min(calls, len(leftovers)))]
    loads = [0] * len(shards)
    for item in sorted(leftovers, key=lambda item: (-len(item.group), item.ref.key)):
        lightest = loads.index(min(loads))
        shards[lightest].append(item)
        loads[lightest] += len(item.group)
    return [Shard([item.ref for item in items], [ref for item in items for ref in item.caches]) for items in shards]
