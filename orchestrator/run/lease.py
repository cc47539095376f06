"""Who may work on a run: each execution takes the next epoch, and functions refuse calls of older ones."""

from __future__ import annotations

from functions.base.wire import LEASES
from orchestrator.base.errors import Fenced
from orchestrator.calls.exchange import AsyncExchange


async def take_lease(store: AsyncExchange, holder: str) -> int:
    """The next epoch, taken with a conditional put. Raises Fenced when another orchestrator takes it first."""
    taken = await store.list(LEASES)
    epoch = 1 + max((int(key.removeprefix(LEASES)) for key in taken), default=0)
    if await store.put_if_absent(f"{LEASES}{epoch:06d}", holder.encode()) is None:
        raise Fenced(f"another orchestrator has just taken this run over (epoch {epoch})")
    return epoch
