"""A stream of results that several readers follow while it grows: how one stage feeds the next before it has ended."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """Append-only; every reader sees all items, from the first. Ends once, whole or with an exception."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._ended = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        self.items.append(item)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[T]:
        position = 0
        while True:
            while position < len(self.items):
                yield self.items[position]
                position += 1
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            await self._changed.wait()

    async def all(self) -> list[T]:
        """Every item, once the stream has ended. Raises what the stream ended with."""
        return [item async for item in self]
