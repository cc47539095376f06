"""A function that generates nothing: it waits for a cut and hands over blobs; or goes on with what was cut."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence

from functions.base.wire import CACHES, Call, Event, Ref
from functions.call.function import Context, FatalError


class Cut:
    def call(self, call: Call, context: Context) -> Iterator[Event]:
        caches = call.inputs.get("caches")
        yield from self._begin(call, context) if caches is None else self._go_on(call, context, caches)

    def _begin(self, call: Call, context: Context) -> Iterator[Event]:
        """Finishes sample 0 at once, the others never; in two parts, each with a blob for its one sample. `die`: at the
        first attempt, when the blobs are written."""
        (ref,) = call.inputs["samples"]
        first = int(context.exchange.get(ref))
        if not list(context.prior):
            yield Event("samples", context.exchange.put(f"{call.prefix}samples", b""), _of(first, 0))
        while not context.cut_requested():
            context.check()
            time.sleep(0.01)
        folder = f"{CACHES}{call.id}/{secrets.token_hex(4)}"
        blobs = [context.exchange.put(f"{folder}/{part}", b"keys and values") for part in (1, 2)]
        self._die_once(call, context)
        for part, cache in enumerate(blobs, 1):
            samples = context.exchange.put(f"{call.prefix}unfinished.{part}", f"{first} {part}".encode())
            yield Event("cut", samples, {**_of(first, part), "caches": [[cache.to_json()]]})
        yield Event("done")

    def _go_on(self, call: Call, context: Context, caches: Sequence[Ref]) -> Iterator[Event]:
        """`fail`: at once; `die`: at the first attempt, after reading."""
        for ref in caches:
            context.exchange.get(ref)
        if call.params["fail"]:
            raise FatalError("no more")
        self._die_once(call, context)
        names = [context.exchange.get(ref).split() for ref in call.inputs["samples"]]
        for first, part in names:
            yield Event(
                "samples",
                context.exchange.put(f"{call.prefix}{int(first)}.{int(part)}", b""),
                _of(int(first), int(part)),
            )
        yield Event("done")

    def _die_once(self, call: Call, context: Context) -> None:
        if call.params["die"] and context.exchange.put_if_absent(f"died/{call.id}", b"") is not None:
            os.kill(os.getpid(), signal.SIGKILL)


def _of(group: int, index: int) -> dict[str, list[int]]:
    return {"group": [group], "index": [index], "prompt_length": [1], "length": [2]}
