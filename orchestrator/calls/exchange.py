"""The exchange as the event loop uses it: each call in a worker thread, an absent store waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from functions.base.wire import Ref
from functions.exchange.base import Buffer, Exchange, ExchangeError, Unavailable
from orchestrator.base.errors import RunError

T = TypeVar("T")


class AsyncExchange:
    """`patience_s`: how long a store that is away is tried again before RunError.

    `threads` = False runs each call inline: for an exchange in memory, in virtual time.
    """

    def __init__(self, exchange: Exchange, *, patience_s: float = 60.0, threads: bool = True) -> None:
        self.exchange = exchange
        self._patience_s = patience_s
        self._threads = threads

    @property
    def durable(self) -> AsyncExchange:
        return AsyncExchange(self.exchange.durable, patience_s=self._patience_s, threads=self._threads)

    async def run(self, action: Callable[[], T]) -> T:
        """Any use of the exchange, retried with backoff while it is away. Actions must be idempotent."""
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + self._patience_s
        pause_s = 0.1
        while True:
            try:
                return await asyncio.to_thread(action) if self._threads else action()
            except Unavailable as error:
                if clock() + pause_s > give_up_s:
                    raise RunError(
                        f"{error}; waited {self._patience_s:g} s (limits.store_s); "
                        "what is committed is safe, mend it and run `rlhf-orchestrate resume`"
                    ) from error
            except ExchangeError as error:  # lost, altered, or a store that refuses us: waiting does not help
                raise RunError(f"exchange: {error}") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    async def put(self, key: str, data: Buffer, *, lifetime_s: float | None = None) -> Ref:
        return await self.run(lambda: self.exchange.put(key, data, lifetime_s=lifetime_s))

    async def put_if_absent(self, key: str, data: Buffer) -> Ref | None:
        """None where a value exists already, unless it is this very value: then an earlier try had succeeded."""

        def attempt() -> Ref | None:
            ref = self.exchange.put_if_absent(key, data)
            if ref is None and self.exchange.get(key) == bytes(data):
                return Ref(key, len(data), "")
            return ref

        return await self.run(attempt)

    async def get(self, key: str | Ref) -> bytes:
        return await self.run(lambda: self.exchange.get(key))

    async def list(self, prefix: str) -> list[str]:
        return await self.run(lambda: self.exchange.list(prefix))

    async def delete(self, prefix: str) -> int:
        return await self.run(lambda: self.exchange.delete(prefix))
