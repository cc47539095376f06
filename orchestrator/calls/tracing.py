"""Traces in OpenTelemetry's form: one a step, over all processes that work on it.

    step 7                                  root
    |-- generate                            a stage: from its first call to its end
    |   |-- call generate                   an attempt at a call; its context travels in Call.trace (W3C traceparent)
    |   |   `-- generate                    the replica's side of it, with its phases:
    |   |       |-- start, read, fetch, load, generate, publish
    |-- reward, reference, train            likewise
    `-- commit

Replicas export nothing: what a call spent its time on comes with its answer (functions/call/meter.py), and is exported
from here. So functions need neither OpenTelemetry nor a way to the collector, a replica may be killed the moment it has
answered, and clocks that differ do no harm (docs/decisions/0008-spans-travel-with-the-answer.md).

Without an exporter (telemetry/otlp.py) all of this does nothing; trace.json is written in any case (trace.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from opentelemetry.trace import NoOpTracer, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from functions.base.wire import Call
from functions.call.meter import Told

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class ReplicaSpan:
    """A finished span of a replica, under the ids that the replica gave it."""

    name: str
    context: SpanContext
    parent: SpanContext
    start_ns: int
    stop_ns: int
    function: str
    replica: str
    attributes: Attributes
    error: str | None = None


class Tracing:
    """Makes the spans of a job. `of_replica` takes those that replicas report."""

    def __init__(
        self, tracer: Tracer | None = None, of_replica: Callable[[ReplicaSpan], None] = lambda _span: None
    ) -> None:
        self._tracer = NoOpTracer() if tracer is None else tracer
        self._of_replica = of_replica

    @contextmanager
    def span(self, name: str, attributes: Attributes | None = None) -> Iterator[Span]:
        """A span that is the parent of those that are begun within it, in this task and in those that it starts."""
        with self._tracer.start_as_current_span(name, attributes=attributes) as span:
            yield span

    def begin(self, name: str, attributes: Attributes | None = None) -> Span:
        """A span under the one at work, to be ended by the caller."""
        return self._tracer.start_span(name, attributes=attributes)

    def attempt(self, function: str, call: Call, within: Span | None) -> AttemptSpan:
        """The span of an attempt at a call, under `within` (None: the span at work)."""
        attributes: Attributes = {"rlhf.function": function, "rlhf.call": call.id, "rlhf.step": call.step}
        context = None if within is None else set_span_in_context(within)
        span = self._tracer.start_span(f"call {function}", context=context, kind=SpanKind.CLIENT, attributes=attributes)
        return AttemptSpan(span, function, call, self._of_replica)


class AttemptSpan:
    """`call` is the call as it is to be sent: with the trace that it is part of."""

    def __init__(self, span: Span, function: str, call: Call, of_replica: Callable[[ReplicaSpan], None]) -> None:
        self._span, self._function, self._of_replica = span, function, of_replica
        carrier: dict[str, str] = {}
        if span.is_recording():
            TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
        self.call = replace(call, trace=carrier) if carrier else call
        self._account: tuple[Told, int] | None = None

    def reported(self, account: Told) -> None:
        """The replica's account, as it came: its last moment is now."""
        self._account = (account, time.time_ns())

    def end(self, replica: str, error: str | None = None, attributes: Attributes | None = None) -> None:
        """`error`: why there is no result. Ending it twice does nothing."""
        span = self._span
        if not span.is_recording():
            return
        span.set_attributes({"rlhf.replica": replica, **(attributes or {})})
        if self._account is not None:
            self._replicas(*self._account, replica, error)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def _replicas(self, account: Told, now_ns: int, replica: str, error: str | None) -> None:
        own = self._span.get_span_context()
        whole = account.spans[0]
        zero_ns = now_ns - round((whole.stop_s or 0.0) * 1e9)

        def context(id: str) -> SpanContext:
            return SpanContext(own.trace_id, int(id, 16), is_remote=False, trace_flags=own.trace_flags)

        for span in account.spans:
            first = span is whole
            traffic = {"rlhf.bytes_in": account.bytes_in, "rlhf.bytes_out": account.bytes_out} if first else {}
            self._of_replica(
                ReplicaSpan(
                    name=span.name,
                    context=context(span.id),
                    parent=own if first else context(span.parent),
                    start_ns=zero_ns + round(span.start_s * 1e9),
                    stop_ns=zero_ns + round((span.stop_s or 0.0) * 1e9),
                    function=self._function,
                    replica=replica,
                    attributes={"rlhf.function": self._function, "rlhf.replica": replica, **traffic},
                    error=error if first else None,
                )
            )
