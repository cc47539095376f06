"""`GET /metrics` in Prometheus' text format, version 0.0.4: the jobs, and the API's own requests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.jobs import STATES, Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class RequestMetrics:
    """Counts requests by method, route and status, and their times to the first byte of the answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._buckets: Counter[float] = Counter()
        self._seconds, self._count = 0.0, 0

    def add(self, method: str, route: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[method, route, status] += 1
            self._seconds += seconds
            self._count += 1
            for bucket in BUCKETS_S:
                self._buckets[bucket] += seconds <= bucket

    def lines(self) -> list[str]:
        with self._lock:
            lines = ["# TYPE rlhf_api_requests_total counter"]
            lines += [
                f"rlhf_api_requests_total{_labels(method=method, route=route, status=str(status))} {count}"
                for (method, route, status), count in sorted(self._requests.items())
            ]
            lines.append("# TYPE rlhf_api_first_byte_seconds histogram")
            lines += [f'rlhf_api_first_byte_seconds_bucket{{le="{b:g}"}} {self._buckets[b]}' for b in BUCKETS_S]
            lines.append(f'rlhf_api_first_byte_seconds_bucket{{le="+Inf"}} {self._count}')
            lines.append(f"rlhf_api_first_byte_seconds_sum {self._seconds:.6f}")
            lines.append(f"rlhf_api_first_byte_seconds_count {self._count}")
            return lines


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


def job_lines(jobs: Iterable[Job]) -> list[str]:
    """Gauges of the jobs. Those that have ended and are at rest count by state only."""
    listed = list(jobs)
    states = Counter(job.state for job in listed)
    lines = ["# TYPE rlhf_jobs gauge", *(f"rlhf_jobs{_labels(state=state)} {states[state]}" for state in STATES)]
    active = [job for job in listed if not job.settled]
    for name, help_text, value in (
        ("rlhf_job_step", "Last committed step", lambda job: job.summary.step),
        ("rlhf_job_steps", "Steps of the job", lambda job: job.config.steps),
        ("rlhf_job_cost_usd", "Cost as of the last committed step", lambda job: job.summary.cost_usd),
        ("rlhf_job_last_step_timestamp_seconds", "When its last step was committed", _last_commit),
        ("rlhf_job_sample_failures", "Samples dropped because their scorer failed", _sample_failures),
        ("rlhf_job_executions", "Times an orchestrator has worked on it", lambda job: job.summary.execution),
    ):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        found = [(job, value(job)) for job in active]
        lines += [f"{name}{_labels(job=job.id)} {number:.15g}" for job, number in found if number is not None]
    lines.append("# TYPE rlhf_job_replicas gauge")
    for job in active:
        if job.alive:
            lines += [
                f"rlhf_job_replicas{_labels(job=job.id, function=function)} {count}"
                for function, count in sorted(job.summary.replicas.items())
            ]
    return lines


def _last_commit(job: Job) -> float | None:
    return job.summary.commits[-1].time if job.summary.commits else None


def _sample_failures(job: Job) -> float:
    return job.summary.sample_failures


def _labels(**labels: str) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"
