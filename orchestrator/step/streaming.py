"""What a streamed train call reads while generation goes on: prompt groups as they are whole, in parts.

    samples  --+
    reward   --+--> a group is whole when all its samples are there, and each column of each of them
    reference--+     --> parts of at least `part` samples --> <prefix>000000, 000001, ...  (functions/train/feed.py)

The last part names the version: by the call that would train on the same samples if all of them were its inputs.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from functions.base.wire import FeedPart, Ref
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.step.dataflow import Samples, Scores


class Streamer:
    """Writes one stream of parts. `part`: samples that are worth one."""

    def __init__(
        self, store: AsyncExchange, prefix: str, samples: Samples, columns: Sequence[Scores], *, part: int,
        lifetime_s: float,
    ) -> None:  # fmt: skip
        self.store, self.prefix, self.part, self.lifetime_s = store, prefix, part, lifetime_s
        self.samples, self.columns = samples, columns
        # How much of each group is still to come: its samples, and each column of them.
        self._lacks = dict.fromkeys(samples.groups, samples.per_group * (1 + len(columns)))
        self._whole: list[int] = []
        self._sample_refs: list[Ref] = []
        self._column_refs: list[Ref] = []
        self._failed: dict[int, set[tuple[int, int]]] = {}
        self._number = 0
        self._count = 0
        self._more = asyncio.Event()

    async def whole(self, groups: int) -> None:
        """Returns when so many groups are whole."""
        while self._count < groups:
            await self._more.wait()

    async def run(self, identity: Callable[[], Awaitable[str]]) -> None:
        """Puts the parts as they come; `identity` is asked for when all samples and columns are there."""
        async with asyncio.TaskGroup() as readers:
            readers.create_task(self._read_samples())
            for scores in self.columns:
                readers.create_task(self._read_columns(scores))
        await self._put(await identity())

    async def _read_samples(self) -> None:
        async for item in self.samples:
            self._sample_refs.append(item.ref)
            await self._came(item.group)

    async def _read_columns(self, scores: Scores) -> None:
        async for event in scores:
            if event.ref is not None:
                self._column_refs.append(event.ref)
            for failed in event.data.get("failed", ()):
                self._failed.setdefault(failed["group"], set()).add((failed["group"], failed["index"]))
            await self._came(event.data["group"])

    async def _came(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._lacks[group] -= 1
            if not self._lacks[group]:
                self._whole.append(group)
                self._count += 1
                self._more.set()
                self._more = asyncio.Event()
        if len(self._whole) * self.samples.per_group >= self.part:
            await self._put("")

    async def _put(self, identity: str) -> None:
        dropped = sorted(key for group in self._whole for key in self._failed.get(group, ()))
        part = FeedPart(self._sample_refs, self._column_refs, sorted(self._whole), dropped, identity)
        key, self._number = f"{self.prefix}{self._number:06d}", self._number + 1
        self._sample_refs, self._column_refs, self._whole = [], [], []
        data = json.dumps(part.to_json()).encode()
        await self.store.put_if_absent(key, data, lifetime_s=self.lifetime_s)  # outlives Redis: its reader waits for it
