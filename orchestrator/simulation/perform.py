"""A call on a simulated replica, from `started` to its last event."""

from __future__ import annotations

from functions.wire import Call, Event
from orchestrator.simulation.functions import Events, Generate, Held, Model, Work, busy, generate, work
from orchestrator.simulation.memory import MemoryExchange
from orchestrator.simulation.training import train


async def perform(call: Call, model: Model, held: Held, exchange: MemoryExchange) -> Events:
    """The call's events, in virtual time."""
    yield Event("started", data={"replica": held.name, "calls": held.calls})
    held.calls += 1
    load_s = held.load_s(call, model)
    if isinstance(model, Work) and held.calls == 1:
        load_s += model.cost.first_s
    if load_s:
        async for beat in busy(load_s):
            yield beat
    if isinstance(model, Generate):
        events = generate(call, model, exchange)
    else:
        events = (train if model.kind == "train" else work)(call, model, exchange)
    async for event in events:
        yield event
