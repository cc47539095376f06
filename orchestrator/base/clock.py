"""The clock that everything of a job reads: its event loop's, which a simulation makes run ahead."""

import asyncio


def now_s() -> float:
    return asyncio.get_running_loop().time()
