"""`metrics.prom`: a job's metrics in Prometheus' text format, kept by its orchestrator and served by the job API.

Replicas live for seconds: few scrapes meet one. What their calls took, moved and failed at is counted here, where every
call's end is seen, and goes on counting over `resume`. Constant label: `job_id`.
"""

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from functions.base.prometheus import Metric, Values, family, text
from orchestrator.base.errors import RunError
from orchestrator.base.files import write_atomically
from orchestrator.planner.base import CallObservation
from orchestrator.run.ledger import Books

FILE = "metrics.prom"
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
STRANGE = Metric("rlhf_job_strange_starts_total", "counter", "Replicas that started on a node while what their "
                 "function had left lay on others (clusters with node agents).", ("function",))  # fmt: skip
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

COUNTED = (
    STEP_SECONDS, STEP_COST, STAGE_SECONDS, REWARD, RESPONSE_TOKENS, VALIDATION, MISMATCH, PLANNER_ERROR, CALLS,
    CALL_SECONDS, PHASE_SECONDS, COLD_START, STRANGE, SAMPLES, TOKENS, BYTES,
)  # fmt: skip
OF_BOOKS = (FUNCTION_COST, REPLICA_SECONDS, BUSY_SECONDS, GPU_SECONDS, STARTS)
METRICS = (*COUNTED, *OF_BOOKS)
_OF_STEP = {"critic/score/mean": REWARD, "response_length/mean": RESPONSE_TOKENS, MISMATCH_METRIC: MISMATCH,
            "perf/time_per_step": STEP_SECONDS}  # fmt: skip
_STAGE, _PLANNER, _VALIDATION = "timing_s/", "planner/error/", "val-core/"


class JobMetrics:
    """Goes on from what an execution before has left in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._constant = {"job_id": directory.absolute().name}
        books = {metric.family for metric in OF_BOOKS}  # they have counted from the job's start
        self._before = [f for f in read_families(self._path, self._constant["job_id"]) if f.name not in books]
        self._values = Values(COUNTED, self._constant)

    def call_ended(self, function: str, outcome: str, call: CallObservation | None) -> None:
        """An attempt is over; `call` says what it took, if it is done."""
        values = self._values
        values.add(CALLS, 1, function, outcome)
        if call is None:
            return
        values.observe(CALL_SECONDS, call.work_s, function)
        for phase, start_s, stop_s in call.phases:
            values.add(PHASE_SECONDS, stop_s - start_s, function, phase)
        if call.cold:
            values.observe(COLD_START, call.start_s, function)
            values.add(STRANGE, call.stats.get("strange", 0.0), function)
        values.add(SAMPLES, call.samples or call.stats.get("samples", 0.0), function)
        tokens = call.prompt_tokens + call.response_tokens
        values.add(TOKENS, tokens or call.stats.get("tokens", 0.0), function)
        for direction in ("in", "out"):
            values.add(BYTES, call.stats.get(f"bytes_{direction}", 0.0), function, direction)

    def committed(self, metrics: Mapping[str, float], step_cost_usd: float) -> None:
        """A step's metrics, by verl's names."""
        values = self._values
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
        costs = books.functions.items()
        read: dict[Metric, dict[tuple[str, ...], float]] = {
            FUNCTION_COST: {(name,): cost.usd for name, cost in costs},
            REPLICA_SECONDS: {(name,): cost.replica_s for name, cost in costs},
            BUSY_SECONDS: {(name,): cost.busy_s for name, cost in costs},
            GPU_SECONDS: {(name,): cost.gpu_s for name, cost in costs},
            STARTS: {(name,): cost.starts for name, cost in costs},
        }
        of_books = [family(metric, values, self._constant) for metric, values in read.items()]
        write_atomically(self._path, text([*self._before, *self._values.collect(), *of_books]).encode(), flush=False)


def read_families(path: Path, job_id: str) -> list[Family]:
    """Of METRICS only, as this version has them: what another counted otherwise is left out.

    None where there is no file. Raises RunError for a file that holds something else.
    """
    try:
        found = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: not a file of metrics ({error!r}); move it away to count anew") from error
    known = {metric.family: metric for metric in METRICS}
    kept = [part for part in found if part.name in known and _fits(part, known[part.name])]
    for part in kept:
        part.samples = [s._replace(labels={**s.labels, "job_id": job_id}) for s in part.samples]
    return kept


def _fits(part: Family, metric: Metric) -> bool:
    labels = {frozenset(sample.labels) - {"le"} for sample in part.samples}
    bounds = {float(sample.labels["le"]) for sample in part.samples if "le" in sample.labels}
    wanted = {*metric.buckets, float("inf")} if metric.kind == "histogram" else set()
    return part.type == metric.kind and labels == {frozenset({"job_id", *metric.labels})} and bounds == wanted
