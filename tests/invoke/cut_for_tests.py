"""A function that generates nothing: it waits for a cut and hands over blobs; or goes on with what was cut."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence

from functions.function import Context, FatalError
from functions.wire import Call, Event, Ref

SECONDS = 20.0


class Cut:
    def call(self, call: Call, context: Context) -> Iterator[Event]:
        caches = call.inputs.get("caches")
        yield from self._begin(call, context) if caches is None else self._go_on(call, context, caches)

    def _begin(self, call: Call, context: Context) -> Iterator[Event]:
        """Finishes sample 0 at once, the others never; in two parts, each with a blob for its one sample."""
        (ref,) = call.inputs["samples"]
        first = int(context.exchange.get(ref))
        yield Event("samples", context.exchange.put(f"{call.prefix}samples", b""), _of(first, 0))
        self._until(context.cut_requested, context)
        for part in (1, 2):
            cache = context.exchange.put(f"{call.prefix}caches/{part:04d}/blob", b"keys and values")
            samples = context.exchange.put(f"{call.prefix}unfinished.{part}", f"{first} {part}".encode())
            yield Event("cut", samples, {**_of(first, part), "caches": [[cache.to_json()]]})
        yield Event("done")

    def _go_on(self, call: Call, context: Context, caches: Sequence[Ref]) -> Iterator[Event]:
        """`fail`: at once; `die`: at the first attempt, after reading; `last`: waits until all others are deleted."""
        for ref in caches:
            context.exchange.get(ref)
        if call.params["fail"]:
            raise FatalError("no more")
        died = f"died/{call.id}"
        if call.params["die"] and context.exchange.put_if_absent(died, b"") is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        names = [context.exchange.get(ref).split() for ref in call.inputs["samples"]]
        if any(int(part) == call.params["last"] for _, part in names):
            mine = {ref.key for ref in caches}
            self._until(lambda: {k for k in context.exchange.list("calls/") if "/caches/" in k} == mine, context)
        for first, part in names:
            yield Event(
                "samples",
                context.exchange.put(f"{call.prefix}{int(first)}.{int(part)}", b""),
                _of(int(first), int(part)),
            )
        yield Event("done")

    def _until(self, condition: object, context: Context) -> None:
        assert callable(condition)
        end = time.monotonic() + SECONDS
        while not condition():
            context.check()
            if time.monotonic() > end:
                raise FatalError("waited in vain")
            time.sleep(0.01)


def _of(group: int, index: int) -> dict[str, list[int]]:
    return {"group": [group], "index": [index], "prompt_length": [1], "length": [2]}
