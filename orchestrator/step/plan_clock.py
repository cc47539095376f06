"""When something that the plan set for a time of the step is done: the plan's times move with generation's end.

How long generation takes is what a plan knows least. What was to happen while samples are generated happens at its
time, or at generation's end if that is earlier; what was to happen some seconds after that end happens so long after
it.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PlanClock:
    """Of one step, which began at `start_s` (event-loop seconds)."""

    start_s: float
    generated_s: float | None
    """When the plan expects the last sample, in seconds from the step's start; None: it does not say."""
    generated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last sample is there."""
    scaled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when generation asks for no more replicas, its tail's included."""

    async def reach(self, planned_s: float) -> None:
        """Returns when what was planned for `planned_s` after the step's start is to be done."""
        after_s = None if self.generated_s is None else planned_s - self.generated_s
        if after_s is not None and after_s > 0:
            await self.generated.wait()
            await asyncio.sleep(after_s)
            return
        left_s = self.start_s + planned_s - asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self.generated.wait()
