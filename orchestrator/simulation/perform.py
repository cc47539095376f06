"""A call on a simulated replica, from `started` to its last event."""

import asyncio
from dataclasses import replace

from functions.base.wire import Call, Event
from orchestrator.simulation.functions import Events, Generate, Held, Model, Work, busy, generate, work
from orchestrator.simulation.memory import MemoryExchange
from orchestrator.simulation.tools import act
from orchestrator.simulation.training import train


async def perform(call: Call, model: Model, held: Held, exchange: MemoryExchange) -> Events:
    """The call's events, in virtual time."""
    yield Event("started", data={"replica": held.name, "calls": held.calls})
    held.calls += 1
    load_s, more_s, told = 0.0, 0.0, {}
    if held.calls == 1:
        load_s, before_s = held.first_call_s(asyncio.get_running_loop().time())
        more_s = model.cost.first_s if isinstance(model, Work) else 0.0
        told["loaded_ahead_s"] = before_s
    load_s += held.take_up_s(list(call.weights.values()), model)
    told["load_s"] = load_s
    if load_s + more_s:
        async for beat in busy(load_s + more_s):
            yield beat
    if isinstance(model, Generate):
        events = generate(call, model, exchange)
    else:
        events = {"train": train, "environment": act}.get(model.kind, work)(call, model, exchange)
    async for event in events:
        yield replace(event, data={**event.data, **told}) if event.kind == "done" else event
