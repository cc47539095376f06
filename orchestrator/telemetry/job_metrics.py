"""`prometheus.json`: a job's metrics, kept by its orchestrator and served by the job API (api/telemetry.py).

Replicas live for seconds: few scrapes meet one. What their calls took, moved and failed at is counted here, where every
call's end is seen, and goes on counting over `resume`. Constant label: `job_id`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from functions.server.prometheus import Metric, Values
from orchestrator.base.errors import RunError
from orchestrator.planner.base import CallObservation
from orchestrator.run.ledger import Books, total
from orchestrator.telemetry.json_file import rewrite

FILE = "prometheus.json"
MISMATCH_METRIC = "rollout_corr/abs_diff_mean"

STEP_SECONDS = Metric("rlhf_job_step_seconds", "gauge", "Seconds that the last step took.")
STEP_COST = Metric("rlhf_job_step_cost_usd", "gauge", "What the last step cost.")
STAGE_SECONDS = Metric("rlhf_job_stage_seconds_total", "counter", "Seconds in each stage of committed steps, by verl's "
                       "names: gen, reward, ref, update_actor, ...; stages overlap.", ("stage",))  # fmt: skip
REWARD = Metric("rlhf_job_reward", "gauge", "Mean score of the last step (critic/score/mean).")
RESPONSE_TOKENS = Metric("rlhf_job_response_tokens", "gauge", "Mean response length of the last step, in tokens.")
VALIDATION = Metric("rlhf_job_validation_score", "gauge", "Each val-core metric of the last validation.", ("name",))
MISMATCH = Metric("rlhf_job_rollout_mismatch", "gauge", "Mean absolute difference of the rollout's and the trainer's "
                  "log-probabilities in the last step (rollout_corr/abs_diff_mean).")  # fmt: skip
PLANNER_ERROR = Metric("rlhf_job_planner_error_ratio", "gauge", "Relative error of what the planner believed of "
                       "the last step, by what it predicted.", ("of",))  # fmt: skip
CALLS = Metric("rlhf_job_calls_total", "counter", "Attempts at calls, by outcome: done, lost (and tried again), "
               "failed.", ("function", "outcome"))  # fmt: skip
CALL_SECONDS = Metric("rlhf_job_call_duration_seconds", "histogram", "Seconds from a call's start on a replica to its "
                      "result.", ("function",))  # fmt: skip
PHASE_SECONDS = Metric("rlhf_job_phase_seconds_total", "counter", "Seconds of calls by phase: start, read, fetch, "
                       "load, generate, ...; phases may lie within others.", ("function", "phase"))  # fmt: skip
COLD_START = Metric("rlhf_job_cold_start_seconds", "histogram", "Seconds from the request of a call to its start, "
                    "where it found no replica that had answered before.", ("function",))  # fmt: skip
SAMPLES = Metric("rlhf_job_samples_total", "counter", "Samples that calls have worked on.", ("function",))
TOKENS = Metric("rlhf_job_tokens_total", "counter", "Tokens of those samples, prompts included.", ("function",))
BYTES = Metric("rlhf_job_exchange_bytes_total", "counter", "Bytes that calls have read from (in) and written to (out) "
               "the exchange.", ("function", "direction"))  # fmt: skip
FUNCTION_COST = Metric("rlhf_job_function_cost_usd_total", "counter", "What a function has cost.", ("function",))
REPLICA_SECONDS = Metric("rlhf_job_replica_seconds_total", "counter", "Seconds that replicas were paid for.",
                         ("function",))  # fmt: skip
BUSY_SECONDS = Metric("rlhf_job_busy_seconds_total", "counter", "Seconds of those at work.", ("function",))
GPU_SECONDS = Metric("rlhf_job_gpu_seconds_total", "counter", "GPU-seconds that were paid for.", ("function",))
STARTS = Metric("rlhf_job_replica_starts_total", "counter", "Replicas started.", ("function",))
RESERVED_COST = Metric("rlhf_job_reserved_cost_usd", "gauge", "What holding every function's replicas for as long "
                       "would have cost.")  # fmt: skip

METRICS = (
    STEP_SECONDS, STEP_COST, STAGE_SECONDS, REWARD, RESPONSE_TOKENS, VALIDATION, MISMATCH, PLANNER_ERROR, CALLS,
    CALL_SECONDS, PHASE_SECONDS, COLD_START, SAMPLES, TOKENS, BYTES, FUNCTION_COST, REPLICA_SECONDS, BUSY_SECONDS,
    GPU_SECONDS, STARTS, RESERVED_COST,
)  # fmt: skip
_OF_STEP = {"critic/score/mean": REWARD, "response_length/mean": RESPONSE_TOKENS, MISMATCH_METRIC: MISMATCH,
            "perf/time_per_step": STEP_SECONDS}  # fmt: skip
_STAGE, _PLANNER, _VALIDATION = "timing_s/", "planner/error/", "val-core/"


class JobMetrics:
    """Goes on from what an execution before has left in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self.values = read_values(self._path) or Values()

    def call_ended(self, function: str, outcome: str, call: CallObservation | None) -> None:
        """An attempt is over; `call` says what it took, if it is done."""
        values = self.values
        values.add(CALLS, 1, function, outcome)
        if call is None:
            return
        values.observe(CALL_SECONDS, call.work_s, function)
        for phase, start_s, stop_s in call.phases:
            values.add(PHASE_SECONDS, stop_s - start_s, function, phase)
        if call.cold:
            values.observe(COLD_START, call.start_s, function)
        values.add(SAMPLES, call.samples or call.stats.get("samples", 0.0), function)
        tokens = call.prompt_tokens + call.response_tokens
        values.add(TOKENS, tokens or call.stats.get("tokens", 0.0), function)
        for direction in ("in", "out"):
            values.add(BYTES, call.stats.get(f"bytes_{direction}", 0.0), function, direction)

    def committed(self, metrics: Mapping[str, float], step_cost_usd: float) -> None:
        """A step's metrics, by verl's names."""
        values = self.values
        values.set(STEP_COST, step_cost_usd)
        for name, value in metrics.items():
            if name in _OF_STEP:
                values.set(_OF_STEP[name], value)
            elif name.startswith(_STAGE) and name != "timing_s/step":
                values.add(STAGE_SECONDS, value, name.removeprefix(_STAGE))
            elif name.startswith(_PLANNER):
                values.set(PLANNER_ERROR, value, name.removeprefix(_PLANNER))
            elif name.startswith(_VALIDATION):
                values.set(VALIDATION, value, name)

    def write(self, books: Books) -> None:
        """Raises RunError where it cannot be written."""
        values = self.values
        for function, cost in books.functions.items():
            for metric, value in (
                (FUNCTION_COST, cost.usd), (REPLICA_SECONDS, cost.replica_s), (BUSY_SECONDS, cost.busy_s),
                (GPU_SECONDS, cost.gpu_s), (STARTS, cost.starts),
            ):  # fmt: skip
                values.set(metric, value, function)
        values.set(RESERVED_COST, total(books.serverful).usd)
        rewrite(self._path, values.to_json())


def read_values(path: Path) -> Values | None:
    """None where there are none. Raises RunError for a file that holds something else."""
    try:
        return Values.from_json(json.loads(path.read_bytes()), METRICS)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: not a file of metrics ({error!r}); move it away to count anew") from error
