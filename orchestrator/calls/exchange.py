"""The exchange as the event loop uses it: each call in a worker thread, an absent store waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from functions.base.wire import Ref, made_in_a_step
from functions.exchange.base import Buffer, Exchange, ExchangeError, NotFound, Unavailable
from orchestrator.base.errors import Away, RunError, ValueLost
from orchestrator.base.outages import Outages

T = TypeVar("T")

PROBE_KEY = "batches/probe"
PROBE_LIFETIME_S = 60.0


class AsyncExchange:
    """`threads` = False runs each call inline: for an exchange in memory, in virtual time."""

    def __init__(self, exchange: Exchange, *, outages: Outages | None = None, threads: bool = True) -> None:
        self.exchange = exchange
        self.outages = outages or Outages()
        self._threads = threads

    @property
    def durable(self) -> AsyncExchange:
        return AsyncExchange(self.exchange.durable, outages=self.outages, threads=self._threads)

    async def run(self, action: Callable[[], T]) -> T:
        """Any use of the exchange, repeated while it is away. Actions are idempotent. Raises RunError, ValueLost."""
        return await self.outages.bridge(lambda: self._once(action))

    async def reachable(self) -> None:
        """Raises Away where no value can be written."""

        def look() -> None:
            for exchange in (self.exchange, self.exchange.durable):
                exchange.put(PROBE_KEY, b"", lifetime_s=PROBE_LIFETIME_S)
                exchange.delete(PROBE_KEY)

        await self._once(look)

    async def _once(self, action: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(action) if self._threads else action()
        except Unavailable as error:
            raise Away(error.store, str(error)) from error
        except ExchangeError as error:  # lost, altered, or a store that refuses us: waiting does not help
            if isinstance(error, NotFound) and made_in_a_step(error.key):
                raise ValueLost(error.key, f"exchange: {error}") from error
            raise RunError(f"exchange: {error}") from error

    async def put(self, key: str, data: Buffer, *, lifetime_s: float | None = None) -> Ref:
        return await self.run(lambda: self.exchange.put(key, data, lifetime_s=lifetime_s))

    async def put_if_absent(self, key: str, data: Buffer, *, lifetime_s: float | None = None) -> Ref | None:
        """None where a value exists already, unless it is this very value: then an earlier try had succeeded."""

        def attempt() -> Ref | None:
            ref = self.exchange.put_if_absent(key, data, lifetime_s=lifetime_s)
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
