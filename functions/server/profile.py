"""A call under torch.profiler: its operators and kernels as a Chrome trace, for Perfetto or chrome://tracing."""

import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

from functions.base.wire import Event
from functions.call.function import Context


def profiled(events: Iterator[Event], context: Context, key: str) -> Generator[Event]:
    """The events of a call, which runs as they are asked for; `done` names its trace, put at `key`, as `profile`.

    Nothing is added where the process has no torch: what it runs has no operators. What other processes do (vLLM's
    workers with more than one GPU) is not in it.
    """
    if "torch" not in sys.modules:
        yield from events
        return
    from torch.profiler import profile

    trace = profile()
    trace.start()
    running = True
    try:
        for event in events:
            if event.kind != "done":
                yield event
                continue
            trace.stop()
            running = False
            file = Path(context.scratch) / "profile.json.gz"
            trace.export_chrome_trace(str(file))
            ref = context.exchange.put(key, file.read_bytes())
            file.unlink()
            yield replace(event, data={**event.data, "profile": ref.to_json()})
    finally:
        if running:
            trace.stop()
        if isinstance(events, Generator):
            events.close()
