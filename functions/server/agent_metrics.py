"""What the node agent answers to `GET /metrics`."""

from collections.abc import Sequence
from typing import get_args

from functions.base.prometheus import Metric, Values, family, text
from functions.server.kept import State

PROCESSES = Metric("rlhf_agent_processes", "gauge", "Processes of the agent, by state.", ("state",))
RESIDENT = Metric("rlhf_agent_parked_bytes", "gauge", "Host memory of parked processes, shared pages in parts.")
BUDGET = Metric("rlhf_agent_parked_bytes_limit", "gauge", "What parked processes may take.")
HITS = Metric("rlhf_agent_hits_total", "counter", "Starts that got a parked process.")
MISSES = Metric("rlhf_agent_misses_total", "counter", "Starts that got a new one.")
EVICTIONS = Metric("rlhf_agent_evictions_total", "counter", "Parked processes that were ended to make room.")


class AgentMetrics:
    def __init__(self, parked_bytes: int) -> None:
        self._values = Values((HITS, MISSES, EVICTIONS))
        self._limit = parked_bytes
        self.add = self._values.add

    def text(self, states: Sequence[State], parked_bytes: int) -> str:
        read: dict[Metric, dict[tuple[str, ...], float]] = {
            PROCESSES: {(state,): states.count(state) for state in get_args(State)},
            RESIDENT: {(): parked_bytes},
            BUDGET: {(): self._limit},
        }
        return text([*self._values.collect(), *(family(metric, values, {}) for metric, values in read.items())])
