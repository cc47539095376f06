"""A sink that others run (wandb, MLflow), in a thread of its own: slow or failing, it never holds the job up.

What it throws is told once, and the job goes on without it; at the end it has `end_s` to finish.
"""

import queue
import threading
from collections.abc import Callable, Mapping

from orchestrator.telemetry.once import Once
from orchestrator.telemetry.sinks import Metrics, Sink

END_S = 30.0


class Background:
    """`open` makes the sink, in its thread. Made in an event loop, whose thread calls `note`."""

    def __init__(
        self, name: str, open: Callable[[], Sink], note: Callable[[str], None], *, end_s: float = END_S
    ) -> None:
        self._name, self._once, self._end_s = name, Once(note), end_s
        self._steps: queue.SimpleQueue[tuple[int, Mapping[str, float]] | bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(open,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Metrics) -> None:
        """Hands the step's metrics over; returns at once."""
        self._steps.put((step, dict(metrics)))

    def close(self, *, failed: bool) -> None:
        self._steps.put(failed)
        self._thread.join(self._end_s)
        if self._thread.is_alive():
            self._once.tell(
                f"{self._name}: has not finished {self._end_s:g} s after the job's end; what it lacks is lost to it"
            )
        self._once.settle()

    def _run(self, open: Callable[[], Sink]) -> None:
        try:
            sink = open()
            while not isinstance(item := self._steps.get(), bool):
                sink.write(*item)
            sink.close(failed=item)
        except BaseException as error:  # SystemExit too: it is other people's code
            said = " ".join(str(error).split()) or type(error).__name__
            self._once.tell(f"{self._name}: {said[:300]}; the job goes on without it")
