"""The orchestrator's sign of life on a cluster: while it is there, the job's processes stay parked on their nodes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from functions.base.wire import ALIVE, ALIVE_S
from orchestrator.base.background import guarded, stopped
from orchestrator.base.errors import RunError
from orchestrator.calls.exchange import AsyncExchange

EVERY_S = ALIVE_S / 3


@asynccontextmanager
async def alive(store: AsyncExchange, failed: Callable[[str], None], *, wanted: bool) -> AsyncIterator[None]:
    """Given for as long as the block runs, and taken back at its end; `failed` gets a line should that break off."""
    if not wanted:
        yield
        return

    async def signs() -> None:
        while True:
            await store.put(ALIVE, b"", lifetime_s=ALIVE_S)
            await asyncio.sleep(EVERY_S)

    giving = guarded("the sign of life for parked processes", signs, failed)
    try:
        yield
    finally:
        await stopped(giving)
        with suppress(RunError):
            await store.delete(ALIVE)
