"""Keys and values of samples that are cut, through the exchange to the call that goes on with them.

    source        engine --Sample.cache--> Outbox: THREADS puts side by side, while the engine makes the next
                  caches/<call id>/<attempt>/g7.i0.00
    destination   inputs.caches --> read: THREADS gets side by side --> Request.cache --> engine

They save time and nothing depends on them: what was lost, altered or made for another kind of engine is computed again
from the sample's tokens, and it is said. A cache made by another version of the policy is no such thing: it is refused.
"""

import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from functions.base.wire import CACHES, Call, Ref, WireError
from functions.call.function import Context, FatalError
from functions.exchange.base import ExchangeError
from functions.generate.engine.base import Engine, Request, Sample
from functions.generate.engine.keys_values import PART_BYTES, CachePart, KeysValues, Layout, decode, encode, join
from functions.generate.engine.requests import fits

THREADS = 4
"""Puts or gets at a time."""
LIFETIME_S = 3600.0
"""They are deleted long before (orchestrator/step/rollout.py); this is for when nobody is left to do it."""

log = logging.getLogger(__name__)


class Outbox:
    """Writes the keys and values of samples as an engine hands them over, a few of them at a time."""

    def __init__(
        self, call: Call, context: Context, names: Sequence[tuple[int, int]], part_bytes: int = PART_BYTES
    ) -> None:
        """`names`: (group, index) of the sample of each number; `part_bytes`: of an object, at most."""
        self._call, self._context, self._names, self._part_bytes = call, context, names, part_bytes
        self._folder = f"{CACHES}{call.id}/{secrets.token_hex(4)}/"
        self._version = call.weights["policy"].number
        self._pool = ThreadPoolExecutor(THREADS, "caches")
        self._puts: dict[int, Future[list[Ref]]] = {}
        self._open: deque[Future[list[Ref]]] = deque()

    def add(self, sample: Sample) -> Sample:
        """The sample without its keys and values, which are on their way."""
        if sample.cache is None:
            return sample
        while len(self._open) >= 2 * THREADS:  # an engine that makes them faster than they are written waits
            wait([self._open.popleft()])
            self._context.check()
        put = self._pool.submit(self._put, sample.cache, *self._names[sample.number])
        self._puts[sample.number] = put
        self._open.append(put)
        return replace(sample, cache=None)

    def close(self) -> None:
        """Waits until all are written; after a failure, until no more is being written."""
        if self._puts:
            with self._context.phase("publish"):
                self._pool.shutdown(cancel_futures=sys.exc_info()[0] is not None)

    def refs(self, number: int) -> list[Ref]:
        """Where a sample's lie; [] where there are none, or they could not be written."""
        put = self._puts.get(number)
        return [] if put is None or put.exception() is not None else put.result()

    def missing(self, engine: Engine, cut: Sequence[Sample]) -> str | None:
        """How many of the samples that were cut lack them, and why, in words. Raises errors of no exchange."""
        begun = [sample for sample in cut if len(sample.response)]
        lacking = [sample for sample in begun if not self.refs(sample.number)]
        if not lacking:
            return None
        errors = [error for put in self._puts.values() for error in (put.exception(),) if error is not None]
        for error in errors:
            if not isinstance(error, ExchangeError):
                raise error
        layout = engine.cache_layout
        why = layout if isinstance(layout, str) else str(errors[0]) if errors else "cut before they were whole"
        text = f"{len(lacking)} of {len(begun)} samples that were cut: {why}"
        log.warning("call %s: keys and values are missing for %s", self._call.id, text)
        return text

    def _put(self, cache: KeysValues, group: int, index: int) -> list[Ref]:
        name = f"{self._folder}g{group}.i{index}"
        blobs = encode(cache, version=self._version, group=group, index=index, part_bytes=self._part_bytes)
        put = self._context.exchange.put
        return [put(f"{name}.{n:02d}", blob, lifetime_s=LIFETIME_S) for n, blob in enumerate(blobs)]


@dataclass
class Inbox:
    """What `read` has found."""

    requests: list[Request]
    read_s: float = 0.0
    begun: int = 0
    """Requests that have a response, so that there is something to move,"""
    without: int = 0
    """and how many of them go without."""
    why: list[str] = field(default_factory=list)

    def hand_over(self) -> list[Request]:
        """The requests with their keys and values, which this lets go of: they may fill much of the memory."""
        requests, self.requests = self.requests, []
        return requests

    @property
    def missing(self) -> str | None:
        """In words, where any is."""
        if not self.without:
            return None
        why = self.why[0] if self.why else "no keys and values came with them"
        return f"{self.without} of {self.begun} samples that came: {why}"


def read(call: Call, context: Context, engine: Engine, requests: Sequence[Request]) -> Inbox:
    """The requests with the keys and values that are among the call's inputs, where these fit the engine.

    Raises FatalError for those of another version of the policy."""
    refs, begun_s = call.inputs.get("caches", ()), time.perf_counter()
    inbox = Inbox(list(requests), begun=sum(len(r.response) > 0 for r in requests))
    if not inbox.begun:
        return inbox
    layout = engine.cache_layout
    if isinstance(layout, str):
        inbox.why.append(layout)
        refs = ()
    parts: dict[tuple[int, int], list[CachePart]] = {}
    for part in _parts(refs, context, inbox.why):
        if part.version != call.weights["policy"].number:
            raise FatalError(
                f"call {call.id}: the keys and values of sample (group {part.group}, index {part.index}) were made by "
                f"version {part.version}; the call's policy is {call.weights['policy'].number}"
            )
        parts.setdefault((part.group, part.index), []).append(part)
    for row, request in enumerate(requests):
        if len(request.response):
            cache = _cache(parts.pop((request.group, request.index), []), request, layout, inbox.why)
            inbox.requests[row] = replace(request, cache=cache)
            inbox.without += cache is None
    inbox.read_s = time.perf_counter() - begun_s if refs else 0.0
    if inbox.missing is not None and refs:
        log.warning("call %s: keys and values are missing for %s", call.id, inbox.missing)
    return inbox


def _parts(refs: Sequence[Ref], context: Context, why: list[str]) -> list[CachePart]:
    """What there is; `why` gets the reason for each that there is not."""
    found: list[CachePart] = []
    if not refs:
        return found

    def get(ref: Ref) -> bytes | ExchangeError:
        try:
            context.check()
            return context.exchange.get(ref)
        except ExchangeError as error:
            return error

    with context.phase("read"), ThreadPoolExecutor(THREADS, "caches") as pool:
        for data in pool.map(get, refs):
            try:
                if isinstance(data, ExchangeError):
                    raise data
                found.append(decode(data))
            except (ExchangeError, WireError) as error:
                why.append(str(error))
    return found


def _cache(parts: Sequence[CachePart], request: Request, layout: Layout | str, why: list[str]) -> KeysValues | None:
    if not parts:
        return None
    try:
        cache = join(parts)
    except WireError as error:
        why.append(str(error))
        return None
    who = f"sample (group {request.group}, index {request.index})"
    if cache.layout != layout:
        why.append(f"{who} has those of {cache.layout}, the engine wants {layout}")
        return None
    if not fits(request, cache.tokens):
        tokens = len(request.prompt) + len(request.response) - 1
        why.append(f"{who} has those of {cache.tokens} tokens, its text has {tokens}")
        return None
    return cache
