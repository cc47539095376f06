"""What a replica answers to `GET /metrics`. Its constant labels: function, replica."""

import os
import time

from functions.base.prometheus import Metric, Values, family, text
from functions.call.meter import Meter
from functions.call.train_params import rollout_bound
from functions.server.attempt import Attempt, Outcome
from functions.server.preload import Ahead
from functions.server.settings import Settings

CALLS = Metric("rlhf_function_calls_total", "counter", "Attempts at calls that have ended, by outcome: done, "
               "replayed, cancelled, deadline, retryable, fatal, broken.", ("outcome",))  # fmt: skip
DURATION = Metric(
    "rlhf_function_call_duration_seconds", "histogram", "Seconds of an attempt at a call.", ("operation",)
)
IN_FLIGHT = Metric("rlhf_function_calls_in_flight", "gauge", "Calls that are open: 0 or 1.")
STATE = Metric("rlhf_function_state", "gauge", "1 for the state that the replica is in.", ("state",))
COLD_START = Metric("rlhf_function_cold_start_seconds", "gauge", "From the start of the process until its function "
                    "could take a call.")  # fmt: skip
AHEAD = Metric("rlhf_function_loaded_ahead_seconds", "gauge", "Seconds that the replica has loaded before its first "
               "call, by its function's hint.")  # fmt: skip
PHASE = Metric("rlhf_function_phase_seconds_total", "counter", "Seconds of calls by phase; phases may lie within "
               "others.", ("phase",))  # fmt: skip
BYTES = Metric("rlhf_function_exchange_bytes_total", "counter", "Bytes read from (in) and written to (out) the "
               "exchange.", ("direction",))  # fmt: skip
SAMPLES = Metric("rlhf_function_samples_total", "counter", "Samples that calls have worked on.")
TOKENS = Metric("rlhf_function_tokens_total", "counter", "Tokens of those samples, prompts included.")
FAILURES = Metric("rlhf_function_scorer_failures_total", "counter", "Samples left without a score because the scorer "
                  "failed; where that fails the call, it is one of calls_total's fatal ones instead.")  # fmt: skip
MISMATCH = Metric("rlhf_function_rollout_mismatch", "gauge", "Mean absolute difference of the rollout's and the "
                  "trainer's log-probabilities, of the last train call (rollout_corr/abs_diff_mean).")  # fmt: skip
BOUND = Metric("rlhf_function_rollout_mismatch_bound", "gauge", "Above it nothing is trained "
               "(algorithm.max_rollout_logprob_diff); absent where that is off.")  # fmt: skip
UP = Metric("rlhf_function_up_seconds", "gauge", "Seconds since the replica listens.")
MEMORY = Metric("process_resident_memory_bytes", "gauge", "Resident memory.")
CPU = Metric("process_cpu_seconds_total", "counter", "User and system time.")

COUNTED = (CALLS, DURATION, COLD_START, AHEAD, PHASE, BYTES, SAMPLES, TOKENS, FAILURES, MISMATCH, BOUND)
METRICS = (CALLS, DURATION, IN_FLIGHT, STATE, COLD_START, AHEAD, PHASE, BYTES, SAMPLES, TOKENS, FAILURES, MISMATCH,
           BOUND, UP, MEMORY, CPU)  # fmt: skip


class ReplicaMetrics:
    """Fed by both threads of a replica."""

    def __init__(self, settings: Settings) -> None:
        self._constant = {"function": settings.function or settings.kind, "replica": settings.name}
        self._values = Values(COUNTED, self._constant)
        self._started_s = time.monotonic()

    def built(self, seconds: float | None = None) -> None:
        """The function is there: the cold start is over, after `seconds` where the process was parked."""
        self._values.set(COLD_START, process_age_s() if seconds is None else seconds)

    def loaded(self, ahead: Ahead) -> None:
        """Loading ahead is over, or there was nothing to load."""
        self._values.set(AHEAD, ahead.seconds)
        self._add_phases(ahead.meter)

    def ended(self, attempt: Attempt, outcome: Outcome | str, seconds: float) -> None:
        values, told = self._values, attempt.meter
        values.add(CALLS, 1, outcome)
        values.observe(DURATION, seconds, attempt.call.operation)
        self._add_phases(told)
        for event in attempt.made:
            data = {**event.data, **event.data.get("stats", {})}
            if "length" in data:
                values.add(SAMPLES, len(data["length"]))
                values.add(TOKENS, sum(data["length"]) + sum(data["prompt_length"]))
            elif event.kind == "done" and {"samples", "tokens"} <= data.keys():
                values.add(SAMPLES, data["samples"])
                values.add(TOKENS, data["tokens"])
            if "failed" in data:
                values.add(FAILURES, len(data["failed"]))
            mismatch = data.get("metrics", {}).get("rollout_corr/abs_diff_mean")
            if mismatch is not None:
                values.set(MISMATCH, mismatch)
        params = attempt.call.params
        if "max_rollout_logprob_diff" in params:
            bound = rollout_bound(params["max_rollout_logprob_diff"], params.get("dtype", "float32"))
            if bound is not None:
                values.set(BOUND, bound)

    def _add_phases(self, told: Meter) -> None:
        """And its bytes."""
        now_s = told.now_s()
        for span in told.spans[1:]:
            self._values.add(PHASE, (now_s if span.stop_s is None else span.stop_s) - span.start_s, span.name)
        self._values.add(BYTES, told.bytes_in, "in")
        self._values.add(BYTES, told.bytes_out, "out")

    def text(self, state: str) -> str:
        with open("/proc/self/statm") as statm:
            resident_bytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        read: dict[Metric, dict[tuple[str, ...], float]] = {
            IN_FLIGHT: {(): int(state == "busy")},
            STATE: {(name,): int(name == state) for name in ("idle", "busy", "draining")},
            UP: {(): time.monotonic() - self._started_s},
            MEMORY: {(): resident_bytes},
            CPU: {(): time.process_time()},
        }
        return text([*self._values.collect(), *(family(m, values, self._constant) for m, values in read.items())])


def process_age_s() -> float:
    """Seconds since this process was started or forked, to the kernel's tick (proc(5), stat, starttime)."""
    with open("/proc/self/stat") as stat:
        started = int(stat.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
