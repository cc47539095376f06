"""A gang call: one call as N concurrent ones, each a rank, that succeed together or are tried again together.

    invoke_gang --attempt A--> rank 0, rank 1, (lost)          all are cancelled
                --attempt B--> rank 0 done, rank 1 done        -> rank 0's `done`
The ranks meet through the exchange, under the attempt's name (functions/train/gang.py). What they make is named after
the call, not after the attempt or the number of ranks: a repeated gang, of whatever size, finds it.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing, nullcontext
from dataclasses import asdict, replace

from opentelemetry.trace import Span

from functions.base.wire import Call, Event
from functions.call.parallel import DATA_PARALLEL, Parallel
from orchestrator.base.errors import Away
from orchestrator.calls.invoke import Idle, Invoker
from orchestrator.planner.base import CallObservation
from orchestrator.platforms.base import CallLost


def rank_calls(call: Call, size: int, attempt: str, parallel: Parallel = DATA_PARALLEL) -> list[Call]:
    """The call of each rank in one attempt; `parallel`: its mesh."""
    gang = {"id": call.id, "attempt": attempt, "size": size, "parallel": asdict(parallel)}
    return [
        replace(call, id=f"{call.id}.r{rank}of{size}", params={**call.params, "gang": {**gang, "rank": rank}})
        for rank in range(size)
    ]


async def invoke_gang(
    invoker: Invoker, function: str, call: Call, size: int, parallel: Parallel, *,
    observe: Callable[[CallObservation], None], within: Span | None = None, idle: Idle = nullcontext,
) -> Event:  # fmt: skip
    """Rank 0's `done`, when all ranks are done; `observe` gets the measures of each rank of the attempt that was whole.

    Raises CallFailed where a rank failed for good, and for one attempt too many; ValueLost and RunError as `invoke`.
    """
    dice, failures = invoker.dice(call), 0
    async with invoker.outages.waiting() as wait:
        while True:
            try:
                ranks = rank_calls(call, size, secrets.token_hex(6), parallel)
                done = await _attempt(invoker, function, ranks, observe, within)
                await wait.over()
                return done
            except Away as away:
                async with idle():
                    await wait.until(away, invoker.probe)
            except CallLost as error:
                failures += 1
                await invoker.pause(function, call, failures, str(error), dice)


async def _attempt(
    invoker: Invoker, function: str, ranks: list[Call], observe: Callable[[CallObservation], None], within: Span | None
) -> Event:
    """One attempt of all ranks: the first that fails cancels the others."""
    measured: list[CallObservation] = []

    async def one(call: Call) -> Event:
        done: Event | None = None
        async with aclosing(invoker.attempt(function, call, observe=measured.append, within=within)) as events:
            async for event in events:
                done = event
        assert done is not None  # an attempt ends with `done` or raises
        return done

    try:
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(one(call)) for call in ranks]
    except ExceptionGroup as failed:  # one that is not to be repeated, where there is one; then one that is no attempt
        raise min(failed.exceptions, key=lambda error: (isinstance(error, CallLost), isinstance(error, Away))) from None
    for observation in measured:
        observe(observation)
    return working[0].result()
