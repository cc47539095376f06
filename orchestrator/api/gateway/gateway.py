"""Many requests over generate replicas that take one call each: batches that grow and shrink by cuts.

A call takes all that waits with the same sampling, up to a replica's slots. While somebody waits, or listens to a
stream, the call is cut every slice: what is finished leaves, what has come joins, and the next call goes on with the
rest, on whichever replica is free. Tokens are only ever appended, with the keys and values that the cut has handed over
(docs/decisions/0012-keys-and-values-move.md); a lost call is repeated from the tokens that are there. A slice is
PATIENCE times as long as a cut costs.

Replicas follow the streams: one for each `slots` of them, none when there has been nothing to do for `idle_s`.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from functions.base.samples import Finish, Ragged, SampleBatch
from functions.base.wire import BATCHES, Call, Event, Ref, Version
from orchestrator.base.clock import now_s
from orchestrator.base.errors import OrchestratorError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.invoke import Invoker, ask_cut
from orchestrator.platforms.base import Platform

log = logging.getLogger(__name__)

FUNCTION = "generate"
SLICE_S = 0.2
"""The shortest slice."""
PATIENCE = 5.0
DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Sampling:
    """What all samples of a call share; the names are GenerateParams'."""

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False


@dataclass(eq=False)
class Stream:
    """One response as it comes. (group, index) is its place in the random stream: the same for the same seed."""

    prompt: Sequence[int]
    sampling: Sampling
    group: int
    index: int
    live: bool = False
    """Somebody wants it as it comes."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = Finish.UNFINISHED
    error: str | None = None
    caches: Sequence[Ref] = ()
    dropped: bool = False
    """Nobody wants the rest."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.index

    @property
    def over(self) -> bool:
        return self.dropped or self.error is not None or self.finish != Finish.UNFINISHED

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], finish: Finish, caches: Sequence[Ref]) -> None:
        """What a call has handed over: the whole response, which begins with the tokens that are there."""
        known = len(self.tokens)
        if list(tokens[:known]) != self.tokens:
            self.fail("a call went on with other tokens than it was given")
            return
        self.tokens += tokens[known:]
        self.logprobs += logprobs[known:]
        self.finish, self.caches = finish, caches
        self._news.set()

    def fail(self, message: str) -> None:
        self.error = message
        self._news.set()

    async def pieces(self) -> AsyncGenerator[int, None]:
        """How many tokens there are, whenever there are more, and once it is over. Dropped where the caller leaves."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                yield len(self.tokens)
                if self.over:
                    return
        finally:
            self.dropped = True


class Gateway:
    """`version` of the model lies in `store`, where the platform's replicas find it."""

    def __init__(
        self, platform: Platform, store: AsyncExchange, version: Version, *, replicas: int = 1, slots: int = 64,
        idle_s: float = 60.0, slice_s: float = SLICE_S,
    ) -> None:  # fmt: skip
        self._platform, self._store, self._version = platform, store, version
        self._invoker = Invoker(platform, note=log.warning, outages=store.outages)
        self._replicas, self._slots, self._idle_s = replicas, slots, idle_s
        self._slice_s = slice_s
        self._session, self._calls = secrets.token_hex(4), 0
        self._waiting: deque[Stream] = deque()
        self._came = asyncio.Event()
        self._busy = 0
        self._wanted = 0
        self._cut_s = 0.0
        """What a cut costs, beside the tokens: as measured."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._replicas)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in [*self._workers, *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._workers, *self._tasks, return_exceptions=True)

    def start(self, stream: Stream) -> None:
        self._waiting.append(stream)
        self._came.set()

    async def _work(self) -> None:
        """One replica's worth of calls."""
        while True:
            batch = await self._next()
            self._busy += 1
            try:
                await self._scale()
                await self._call(batch)
            except OrchestratorError as error:
                log.warning("%s", error)
                for stream in batch:
                    stream.fail(str(error))
            except Exception:
                log.exception("a call of the gateway failed")
                for stream in batch:
                    stream.fail("the server failed on this request; its log says where")
            finally:
                self._busy -= 1
                again = [stream for stream in batch if not stream.over]
                self._waiting.extend(again)
                self._came.set()

    async def _next(self) -> list[Stream]:
        while not (batch := self._batch()):
            self._came.clear()
            if self._busy or not self._wanted:
                await self._came.wait()
                continue
            try:
                await asyncio.wait_for(self._came.wait(), self._idle_s)
            except TimeoutError:
                if not self._busy:
                    await self._scale(0)
        return batch

    def _batch(self) -> list[Stream]:
        """The first that waits, and those after it that one call can take along."""
        batch: dict[tuple[int, int], Stream] = {}
        left: deque[Stream] = deque()
        sampling: Sampling | None = None
        for stream in self._waiting:
            if stream.over:
                continue
            sampling = sampling or stream.sampling
            if stream.sampling == sampling and len(batch) < self._slots and stream.key not in batch:
                batch[stream.key] = stream
            else:
                left.append(stream)
        self._waiting = left
        return list(batch.values())

    async def _scale(self, wanted: int | None = None) -> None:
        more = -(-len(self._waiting) // self._slots)
        wanted = min(self._replicas, max(self._wanted, self._busy + more)) if wanted is None else wanted
        if wanted != self._wanted:
            self._wanted = wanted
            await self._platform.scale(FUNCTION, wanted)

    async def _call(self, batch: Sequence[Stream]) -> None:
        self._calls += 1
        id = f"{self._session}.{self._calls}"
        place = f"{BATCHES}{id}/samples"
        samples = await self._store.put(place, _samples(batch, self._version.number).encode())
        caches = [ref for stream in batch for ref in stream.caches]
        inputs = {"samples": [samples]} | ({"caches": caches} if caches else {})
        params = {**vars(batch[0].sampling), "chunk": 1}
        call = Call(id, "generate", inputs, {"policy": self._version}, params, epoch=1, deadline_s=DEADLINE_S)
        by = {stream.key: stream for stream in batch}
        cutter = asyncio.create_task(self._cut(call, batch))
        begun_s, was_cut, decode_s = now_s(), False, 0.0
        try:
            async with contextlib.aclosing(self._invoker.invoke(FUNCTION, call)) as events:
                async for event in events:
                    if event.kind == "started":
                        begun_s = now_s()
                    if event.kind in ("samples", "cut") and event.ref is not None:
                        was_cut |= event.kind == "cut"
                        _hand_over(SampleBatch.decode(await self._store.get(event.ref)), event, by)
                    if event.kind == "done":
                        decode_s = float(event.data.get("decode_s", 0.0))
        finally:
            cutter.cancel()
            self._later(self._clear(call, place, caches))
        if was_cut and not self._cut_s:
            self._cut_s = 1e-3  # the first loads the model
        elif was_cut:
            self._cut_s += 0.3 * (max(0.0, now_s() - begun_s - decode_s) - self._cut_s)

    async def _cut(self, call: Call, batch: Sequence[Stream]) -> None:
        """Once it is worth it: somebody waits, listens, or has gone."""
        slice_s = max(self._slice_s, PATIENCE * self._cut_s)
        while True:
            await asyncio.sleep(slice_s)
            if self._waiting or any(not stream.over and stream.live for stream in batch) or all(s.over for s in batch):
                await ask_cut(self._store, call)
                return

    async def _clear(self, call: Call, place: str, caches: Sequence[Ref]) -> None:
        """What the call has made and was given, but for the keys and values that it hands over."""
        for prefix in (call.prefix, place, *(ref.key for ref in caches)):
            await self._store.delete(prefix)

    def _later(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _samples(batch: Sequence[Stream], version: int) -> SampleBatch:
    count = len(batch)
    return SampleBatch(
        prompts=Ragged.from_rows([stream.prompt for stream in batch], np.int32),
        prompt=np.arange(count, dtype=np.int32),
        group=np.array([stream.group for stream in batch], np.int32),
        index=np.array([stream.index for stream in batch], np.int32),
        responses=Ragged.from_rows([stream.tokens for stream in batch], np.int32),
        logprobs=np.array([x for stream in batch for x in stream.logprobs], np.float32),
        mask=np.ones(sum(len(stream.tokens) for stream in batch), np.float32),
        finish=np.full(count, Finish.UNFINISHED, np.int32),
        version=np.full(count, version, np.int32),
    )


def _hand_over(samples: SampleBatch, event: Event, streams: dict[tuple[int, int], Stream]) -> None:
    responses = samples.responses.rows()
    logprobs = Ragged(samples.logprobs, samples.responses.lengths).rows()
    caches = event.data.get("caches") or [[]] * len(samples)
    for row, key in enumerate(samples.keys):
        finish = Finish(int(samples.finish[row]))
        refs = [Ref.from_json(ref) for ref in caches[row]]
        streams[key].take(responses[row].tolist(), logprobs[row].tolist(), finish, refs)
