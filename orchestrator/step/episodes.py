"""A generation whose samples have turns.

    shards --> generate slots --a turn has ended--> environment slots --answered--> generate slots, at mask 0
                                                         |
                                                         +--the episode is over--> whoever follows

Nobody waits for all: a replica that generates takes what is answered by then, and goes where nothing is for long
(slots.py). A turn is a cut: the keys and values of long samples go along, those of short ones are computed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from functions.base.samples import Finish
from functions.base.wire import Call, Event, Json, Ref
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Stage
from orchestrator.step.dataflow import Finished, Samples
from orchestrator.step.rollout import Shard
from orchestrator.step.slots import Slots

KEEP_FROM = 512
"""Tokens from which on a sample's keys and values move with it (functions/generate/engine/base.py, Sampling)."""


@dataclass
class Episodes:
    """`generate_call` and `act_call` make the calls for samples that are to go on, and for those to be answered."""

    generate_call: Callable[[Shard], Call]
    act_call: Callable[[Sequence[Ref]], Call]
    store: AsyncExchange
    caches: str
    """Prefix of the keys and values that its calls hand over."""
    unfinished: int
    concurrency: int
    """Episodes that one replica of the environment serves at a time."""
    finished: list[Finished] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    """turns, tool_calls, tool_errors, failed of the samples that are over, and how often they ended how."""
    texts: list[Ref] = field(default_factory=list)
    failed: list[Json] = field(default_factory=list)
    let_go: int = 0
    _caches: dict[tuple[int, int], list[Ref]] = field(default_factory=dict)

    @property
    def response_tokens(self) -> int:
        return sum(sum(item.length) for item in self.finished)

    async def run(
        self, generate: Stage, environment: Stage, shards: Sequence[Finished], samples: Samples, *, ask: bool = False
    ) -> None:
        """All to their end; `shards`: one for each replica to begin with. `ask`: environments make the prompts."""
        most = -(-self.unfinished // max(1, generate.replicas))

        def part(ready: list[Finished], limit: int) -> list[Finished]:
            taken = [ready.pop(0)]
            while ready and sum(len(item.group) for item in taken) + len(ready[0].group) <= limit:
                taken.append(ready.pop(0))
            return taken

        async def turn(items: Sequence[Finished]) -> None:
            caches = [ref for item in items for key in item.keys for ref in self._caches.pop(key, ())]
            call = self.generate_call(Shard([item.ref for item in items], caches))
            async for event in generate.call(call):
                if event.kind in ("samples", "cut") and event.ref is not None:
                    item = self._note(event)
                    (acting if event.kind == "samples" else generating).put(item)

        async def act(items: Sequence[Finished]) -> None:
            async for event in environment.call(self.act_call([item.ref for item in items])):
                if event.kind != "samples":
                    continue
                item = Finished.of(event)
                if event.data["finish"][0] == Finish.UNFINISHED:
                    generating.put(item)
                else:
                    self._over(item, event, samples)
            if not self.unfinished:
                generating.end()
                acting.end()

        generating = Slots(generate, generate.replicas, lambda ready: part(ready, most), turn)
        acting = Slots(environment, environment.replicas, lambda ready: part(ready, self.concurrency), act)
        for shard in shards:
            (acting if ask else generating).put(shard)
        if not shards:
            generating.end()
            acting.end()
        async with asyncio.TaskGroup() as both:
            both.create_task(generating.run())
            both.create_task(acting.run())
        self.let_go = generating.let_go

    def _note(self, event: Event) -> Finished:
        """Keeps where the samples' keys and values are."""
        item = Finished.of(event)
        for key, refs in zip(item.keys, event.data.get("caches", ()), strict=False):
            self._caches[key] = [Ref.from_json(ref) for ref in refs]
        return item

    def _over(self, item: Finished, event: Event, samples: Samples) -> None:
        data = event.data
        self.unfinished -= len(item.group)
        self.finished.append(item)
        for name in ("turns", "tool_calls", "tool_errors"):
            self.said[name] += sum(data[name])
        self.said.update(f"finish/{Finish(finish).name.lower()}" for finish in data["finish"])
        self.said["failed"] += len(data["failed"])
        self.failed += data["failed"]
        if "texts" in data:
            self.texts.append(Ref.from_json(data["texts"]))
        for key in item.keys:
            self._caches.pop(key, None)
        columns = Ref.from_json(data["columns"]) if "columns" in data else None
        samples.environment.put(Event("done", columns, {"group": list(item.group), "failed": data["failed"]}))
        samples.put(item)

    def metrics(self) -> dict[str, float]:
        """environment/*, over the samples; and rollout/replicas_let_go."""
        count = max(1, sum(len(item.group) for item in self.finished))
        shares = {f"environment/{name}": number / count for name, number in sorted(self.said.items())}
        return shares | {"rollout/replicas_let_go": float(self.let_go)}

    async def free(self) -> None:
        """Deletes the keys and values that were handed over."""
        await self.store.delete(self.caches)
