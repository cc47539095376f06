"""An OpenTelemetry collector's OTLP/HTTP receiver, in the test's process."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    url: str
    status: int = 200
    holds: threading.Event | None = None
    """Answers wait for it."""
    asked: threading.Event = field(default_factory=threading.Event)
    spans: list[tuple[dict[str, str], Span]] = field(default_factory=list)
    """With the attributes of their resource."""
    paths: set[str] = field(default_factory=set)


@contextmanager
def collecting(status: int = 200, *, holds: threading.Event | None = None) -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.asked.set()
            if collector.holds is not None:
                collector.holds.wait(200)
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.paths.add(self.path)
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {a.key: a.value.string_value for a in part.resource.attributes}
                collector.spans += [(about, span) for scope in part.scope_spans for span in scope.spans]
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}", status, holds)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        if holds is not None:
            holds.set()
        server.shutdown()
        server.server_close()
        thread.join()
