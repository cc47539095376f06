"""The export of traces by OTLP over HTTP, with OpenTelemetry's SDK (extra `otel`).

On where the job says `telemetry.otlp_endpoint`, or the standard variable OTEL_EXPORTER_OTLP_ENDPOINT is set; the other
variables of the exporter (OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _CERTIFICATE, ...) count as well. Spans leave in a
thread of the SDK's. A collector that is away or slow costs spans, never time: what does not fit the queue is dropped,
the job's end waits `end_s` at most, and the job's events say it once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind, Status, StatusCode

from orchestrator.base.errors import ConfigError
from orchestrator.calls.tracing import ReplicaSpan, Tracing
from orchestrator.job.config import JobConfig
from orchestrator.telemetry.once import Once

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

END_S = 5.0
EVERY_S = 1.0
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = "wants OpenTelemetry's SDK and exporter: pip install 'rlhf-orchestrate[otel]'"


def endpoint_of(job: JobConfig) -> str | None:
    """Where a job's traces go; None: nowhere."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if job.telemetry.otlp_endpoint is not None:
        return f"{job.telemetry.otlp_endpoint.rstrip('/')}/v1/traces"
    if os.environ.get(VARIABLES[0]):
        return os.environ[VARIABLES[0]]
    base = os.environ.get(VARIABLES[1])
    return f"{base.rstrip('/')}/v1/traces" if base else None


def check_exporter(job: JobConfig) -> None:
    """Raises ConfigError where the job asks for what is not installed."""
    if job.telemetry.otlp_endpoint is not None and not _installed():
        raise ConfigError(f"telemetry.otlp_endpoint: {MISSING}")


@contextmanager
def open_tracing(
    job: JobConfig, note: Callable[[str], None], *, end_s: float = END_S, every_s: float = EVERY_S
) -> Iterator[Tracing]:
    """Inside an event loop; `note` is called in its thread, at most once. Spans leave every `every_s`."""
    endpoint = endpoint_of(job)
    if endpoint is None:
        yield Tracing()
        return
    if not _installed():  # the variable is the machine's, not the job's: it does not fail for it
        note(f"no traces are exported to {endpoint}: it {MISSING}")
        yield Tracing()
        return
    exporter = _Exporter(endpoint, job.name, note, every_s)
    try:
        yield exporter.tracing
    finally:
        exporter.close(end_s)


class _Exporter:
    def __init__(self, endpoint: str, job: str, note: Callable[[str], None], every_s: float) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it repeats itself; the job's events say it once
        self._endpoint, self._job, self._once = endpoint, job, Once(note)
        self._resources: dict[tuple[str, str], Resource] = {}
        inner = OTLPSpanExporter(endpoint)
        outer = self

        class Telling(SpanExporter):
            """The exporter, telling of the first failure."""

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = inner.export(spans)
                if result is not SpanExportResult.SUCCESS:
                    outer._failed("it does not answer, or refuses them")
                return result

            def shutdown(self) -> None:
                inner.shutdown()  # type: ignore[no-untyped-call]  # it has no annotation

        self._processor = BatchSpanProcessor(Telling(), schedule_delay_millis=every_s * 1e3)
        self._resource = Resource.create({"service.name": "rlhf-orchestrate", "rlhf.job": job})
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self.tracing = Tracing(provider.get_tracer("rlhf-orchestrate"), self._of_replica)

    def _of_replica(self, span: ReplicaSpan) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan

        who = (span.function, span.replica)
        if who not in self._resources:
            name = {"service.name": f"rlhf-orchestrate.{span.function}", "service.instance.id": span.replica}
            self._resources[who] = Resource.create({**name, "rlhf.job": self._job})
        first = "rlhf.bytes_in" in span.attributes
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=span.context,
                parent=span.parent,
                resource=self._resources[who],
                attributes=span.attributes,
                kind=SpanKind.SERVER if first else SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=span.start_ns,
                end_time=span.stop_ns,
            )
        )

    def _failed(self, reason: str) -> None:
        self._once.tell(f"traces are not exported to {self._endpoint}: {reason}; the job goes on without")

    def close(self, end_s: float) -> None:
        """Exports what is left, for `end_s` at most."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True, name="end of traces")
        ending.start()
        ending.join(end_s)
        if ending.is_alive():
            self._failed("not all spans were taken in time")
        self._once.settle()


def _installed() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        return False
    return True
