"""Traces that end in memory, and a collector that takes OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from broker.traces.otel import OtelTraces
from configs.schema import TracesSection


class Memory:
    """Traces whose spans a test reads."""

    def __init__(self, **settings: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = OtelTraces(TracesSection(**{"ratio": 1.0, "interval_s": 0.05, **settings}), self._exporter, {})

    def finished(self) -> tuple[ReadableSpan, ...]:
        """All spans that ended; nothing can be written afterwards."""
        self.traces.close()
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of one name."""
        return [span for span in self.finished() if span.name == name]


class Collector(ThreadingHTTPServer):
    """Keeps what arrives at /v1/traces, or answers `status`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.spans = 200, list[Any]()
        self.services: dict[bytes, str] = {}  # span id -> service.name

    @property
    def endpoint(self) -> str:
        """For traces.endpoint."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.status == 200 and self.path == "/v1/traces":
            for of in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {a.key: a.value.string_value for a in of.resource.attributes}
                for scope in of.scope_spans:
                    self.server.spans.extend(scope.spans)
                    self.server.services |= {span.span_id: names["service.name"] for span in scope.spans}
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A running collector."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
