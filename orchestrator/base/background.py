"""What goes on beside the work and is not waited for: supervised, so that nothing of it dies unseen.

    watch = guarded("the view", endless, failed)     failed("the view has ended: ...") should it ever end by itself
    await stopped(watch)                              cancelled, and waited for

An endless task that ends is an error, however it ends (after `guard` of kopf's aiotasks).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from orchestrator.base.errors import OrchestratorError, RunError

log = logging.getLogger(__name__)


def guarded(
    name: str, endless: Callable[[], Coroutine[Any, Any, None]], failed: Callable[[str], None]
) -> asyncio.Task[None]:
    """Runs `endless` until it is cancelled. `failed` gets one line should it end by itself; the task ends then too."""

    async def run() -> None:
        try:
            await endless()
        except Exception as error:
            log.debug("%s has ended", name, exc_info=error)
            failed(f"{name} has ended: {in_one_line(error)}")
        else:
            failed(f"{name} has ended, and never should")

    return asyncio.create_task(run(), name=name)


async def stopped(task: asyncio.Task[None]) -> None:
    """Cancels `task` and returns when it is over; being cancelled meanwhile is not mistaken for its end."""
    task.cancel()
    await asyncio.wait([task])


class Retried:
    """Things that are done again and again and may fail for a while, as when a disk is full.

    `note` is told when one of them begins to fail, and not again before it has worked.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._failing: set[str] = set()

    def attempt(self, name: str, action: Callable[[], object]) -> None:
        """Does it, if it can be done: OSError and RunError are told, anything else is raised."""
        try:
            action()
        except (OSError, RunError) as error:
            if name not in self._failing:
                self._failing.add(name)
                self._note(f"{name}: {in_one_line(error)}; tried again until it works")
        else:
            self._failing.discard(name)


def in_one_line(error: BaseException) -> str:
    """What a person reads of it; of an error that nobody has foreseen also its type."""
    said = " ".join(str(error).split())
    return said if isinstance(error, OrchestratorError | OSError) and said else f"{type(error).__name__}: {said}"
