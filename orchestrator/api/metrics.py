"""`GET /metrics` in Prometheus' text format: the jobs, and the API's own requests.

What a job's orchestrator counts comes from its run directory (telemetry/job_metrics.py). The label of a job is
`job_id`: `job` is Prometheus' own word for what it scrapes. A job that has ended and is at rest counts by state only.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import Metric as Family
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from functions.base.prometheus import Metric, Values, family, text
from functions.call.train_params import rollout_bound
from orchestrator.api.jobs import STATES, Job
from orchestrator.base.errors import RunError
from orchestrator.recipes.settings import rollout_diff
from orchestrator.telemetry.job_metrics import FILE, read_families
from orchestrator.telemetry.job_metrics import METRICS as OWN_METRICS

FIRST_BYTE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUESTS = Metric("rlhf_api_requests_total", "counter", "Requests that were answered.", ("method", "route", "status"))
FIRST_BYTE = Metric("rlhf_api_first_byte_seconds", "histogram", "Seconds to the first byte of an answer.", (),
                    FIRST_BYTE_S)  # fmt: skip
JOBS = Metric("rlhf_jobs", "gauge", "Jobs by state.", ("state",))
STATE = Metric("rlhf_job_state", "gauge", "1: the job's state, its name and its recipe.", ("state", "name", "recipe"))
STEP = Metric("rlhf_job_step", "gauge", "Last committed step.")
STEPS = Metric("rlhf_job_steps", "gauge", "Steps of the job.")
COST = Metric("rlhf_job_cost_usd", "gauge", "Cost as of the last look into the books.")
BUDGET = Metric("rlhf_job_step_budget_usd", "gauge", "What a step may cost (planner.budget_usd); absent without one.")
LAST_STEP = Metric("rlhf_job_last_step_timestamp_seconds", "gauge", "When its last step was committed; before the "
                   "first, when it was started.")  # fmt: skip
FAILURES = Metric("rlhf_job_scorer_failures_total", "counter", "Samples dropped because their scorer failed.")
EXECUTIONS = Metric("rlhf_job_executions_total", "counter", "Times an orchestrator has begun to work on it.")
REPLICAS = Metric("rlhf_job_replicas", "gauge", "Replicas that exist, by state: starting, idle, busy, draining.",
                  ("function", "state"))  # fmt: skip
BOUND = Metric("rlhf_job_rollout_mismatch_bound", "gauge", "Above it nothing is trained "
               "(algorithm.max_rollout_logprob_diff); absent where that is off.")  # fmt: skip

API_METRICS = (REQUESTS, FIRST_BYTE)
JOB_METRICS = (STATE, STEP, STEPS, COST, BUDGET, LAST_STEP, FAILURES, EXECUTIONS, REPLICAS, BOUND, *OWN_METRICS)
METRICS = (JOBS, *JOB_METRICS, *API_METRICS)


class RequestMetrics:
    """Counts requests by method, route and status, and their times to the first byte of the answer."""

    def __init__(self) -> None:
        self.values = Values(API_METRICS)

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        self.values.add(REQUESTS, 1, method, route, str(status))
        self.values.observe(FIRST_BYTE, seconds)

    def text(self) -> str:
        return text(self.values.collect())


class Measured:
    """ASGI middleware that feeds RequestMetrics."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()

        async def measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.add(scope["method"], route, message["status"], time.monotonic() - begun_s)
            await send(message)

        await self._app(scope, receive, measured)


def jobs_text(jobs: Iterable[Job], runs: Path) -> str:
    """All metrics of the jobs whose run directories lie in `runs`."""
    listed = list(jobs)
    states = Counter(job.state for job in listed)
    families = [family(JOBS, {(state,): states[state] for state in STATES})]
    for job in (job for job in listed if not job.settled):
        families += job_families(job)
        with suppress(RunError):  # its orchestrator says so; the other jobs have their metrics
            families += read_families(runs / job.id / FILE, job.id)
    return text(families)


def job_families(job: Job) -> list[Family]:
    """What a job's configuration and events say."""
    summary = job.summary
    now = (job.now or {}).get("usd")
    last = summary.commits[-1].time if summary.commits else summary.started_at
    numbers = {
        STEPS: job.config.steps, FAILURES: summary.sample_failures, EXECUTIONS: summary.execution, STEP: summary.step,
        COST: summary.cost_usd if now is None else now, LAST_STEP: last, BUDGET: job.config.planner.budget_usd,
        BOUND: rollout_bound(rollout_diff(job.config), job.config.model.dtype),
    }  # fmt: skip
    read: dict[Metric, Mapping[tuple[str, ...], float]] = {
        STATE: {(job.state, job.desired.name or job.config.name, job.config.recipe): 1},
        **{metric: {(): float(value)} for metric, value in numbers.items() if value is not None},
    }
    if job.alive:
        lives = [life for life in (job.now or {}).get("lives", ()) if life["stop_s"] is None]
        read[REPLICAS] = Counter((life["function"], life["phases"][-1][0]) for life in lives if life["phases"])
    return [family(metric, values, {"job_id": job.id}) for metric, values in read.items()]
