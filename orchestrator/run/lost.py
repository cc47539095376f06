"""Values of a step that the store has lost (a Redis emptied in mid-step): what made them is done again, by call.

    calls/s000007.generate.1f.../events/000000 --names--> calls/s000007.generate.1f.../<attempt>/samples.0   gone

A call of whose results something is gone is forgotten, log and all; then the step is begun again from its journal
parent. What the orchestrator itself had put it puts again, calls that are whole say what they said, those forgotten are
made again, and with them what followed from them (a call's id names its inputs).
"""

from collections.abc import Iterator
from typing import Any

from functions.base.wire import CALLS, Event, Ref, WireError
from functions.exchange.base import Corrupt, Exchange, NotFound
from orchestrator.calls.exchange import AsyncExchange


async def forget_lost(store: AsyncExchange, step: int) -> int:
    """Deletes what is left of the step's calls that have lost something; how many these are."""
    return await store.run(lambda: _forget_lost(store.exchange, step))


def _forget_lost(exchange: Exchange, step: int) -> int:
    logs: dict[str, list[str]] = {}
    for key in exchange.list(f"{CALLS}s{step:06d}."):
        logs.setdefault(key.split("/")[1], []).append(key)
    lost = [call for call, keys in logs.items() if not _whole(exchange, keys)]
    for call in lost:
        exchange.delete(f"{CALLS}{call}/")
    return len(lost)


def _whole(exchange: Exchange, keys: list[str]) -> bool:
    """Whether the call that has these keys has all that its log names; a call without a log has nothing to be kept."""
    logs = [key for key in keys if key.split("/")[2] == "events"]
    try:
        events = [Event.from_line(line) for key in logs for line in exchange.get(key).splitlines()]
        for ref in _refs([event.to_json() for event in events]):
            if ref.key.startswith(CALLS):
                exchange.get(ref, start=0, length=min(1, ref.size_bytes))
    except (NotFound, Corrupt, WireError):
        return False
    return bool(logs)


def _refs(value: Any) -> Iterator[Ref]:
    """Every Ref in events' JSON, also those in their data."""
    if isinstance(value, dict):
        if value.keys() == {"key", "size_bytes", "checksum"}:
            yield Ref.from_json(value)
        else:
            for item in value.values():
                yield from _refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)
