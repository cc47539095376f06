"""The environment function in simulations: answers that take their time."""

import asyncio
import heapq
from dataclasses import replace

from functions.base.samples import Finish
from functions.base.wire import Call, Event
from orchestrator.simulation.clock import TICK_S
from orchestrator.simulation.functions import HEARTBEAT_S, Events, Work, samples_event, set_within
from orchestrator.simulation.memory import MemoryExchange


async def act(call: Call, model: Work, exchange: MemoryExchange) -> Events:
    """Answers turns side by side, and hands each on at once; what a cut call was asked goes on."""
    turns = model.turns
    assert turns is not None, "of an environment"
    clock = asyncio.get_running_loop().time
    batch = exchange.samples(call.inputs["samples"])
    rows, have, begun_s = batch.prompts.rows(), batch.responses.lengths.tolist(), clock()
    due: list[tuple[float, int, bool]] = []
    for k, (row, (group, index)) in enumerate(zip(batch.prompt.tolist(), batch.keys, strict=True)):
        ends = turns.ends(call.step, group, index, rows[row])
        over = int(batch.finish[k]) == Finish.LENGTH or have[k] >= ends[-1]
        answer_s = 0.0 if over else turns.answer_s(call.step, group, index, ends.index(have[k]) + 1)
        due_s = begun_s + model.cost.call_s + answer_s
        heapq.heappush(due, (model.asked.pop((group, index), due_s), k, over))
    number, cut = 0, exchange.watch(call.cut_key)
    while due:
        while (left_s := due[0][0] - clock()) > TICK_S and not await set_within(cut, min(HEARTBEAT_S, left_s)):
            yield Event("progress")
        if left_s > 0 and cut.is_set():
            break
        _, k, over = heapq.heappop(due)
        tokens = have[k] + (0 if over else turns.observation_tokens)
        finish = Finish(int(batch.finish[k])) if over else Finish.UNFINISHED
        event = samples_event(call, exchange, batch, [k], [tokens], number, finish=finish)
        told = {"turns": [0], "tool_calls": [0], "tool_errors": [0], "failed": []} if over else {}
        yield replace(event, data={**event.data, **told})
        number += 1
    exchange.unwatch(call.cut_key)
    model.asked.update({batch.keys[k]: due_s for due_s, k, _ in due})
    if due:
        left = [k for _, k, _ in due]
        event = samples_event(call, exchange, batch, left, [have[k] for k in left], number, kind="cut")
        yield replace(event, ref=exchange.put(f"{call.prefix}unanswered", batch.select(left).encode()))  # as they came
    yield Event("done", data={"samples": len(batch), "tokens": sum(have), "seconds": clock() - begun_s})
