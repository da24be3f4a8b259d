"""Traces by OpenTelemetry's SDK, sent as OTLP over HTTP.

Invariant: no process-global provider is set and nothing is left for the interpreter's exit. The first span of a trace
draws whether it is recorded; all others follow the context that reaches them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from broker.traces.port import NO_SPAN, Span, Value
from broker.traces.sender import Sender
from configs.schema import TracesSection

W3C = TraceContextTextMapPropagator()
CLOSE_S = 1.0  # a worker that is told to end has five seconds for all
PREFIX = "lagrange."  # of attributes


class Recorded:
    """A span that is recorded. Implements Span."""

    def __init__(self, tracer: Tracer, span: OtelSpan) -> None:
        self._tracer, self._span = tracer, span

    @property
    def context(self) -> str:
        """See Span."""
        carrier: dict[str, str] = {}
        W3C.inject(carrier, set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def child(self, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """See Span."""
        around = set_span_in_context(self._span)
        made = self._tracer.start_span(name, around, attributes=named(attributes), start_time=began_ns)
        return Recorded(self._tracer, made)

    def event(self, name: str, **attributes: Value) -> None:
        """See Span."""
        self._span.add_event(name, named(attributes))

    def end(self, problem: str = "", *, ended_ns: int | None = None, **attributes: Value) -> None:
        """See Span."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(named(attributes))
        if problem:
            self._span.set_status(Status(StatusCode.ERROR, problem))
        self._span.end(ended_ns)

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.end("" if kind is None else kind.__name__)


class OtelTraces:
    """Implements Traces, over any exporter."""

    def __init__(self, settings: TracesSection, exporter: SpanExporter, resource: Mapping[str, str]) -> None:
        """resource: attributes of the process."""
        self._sender = Sender(exporter, interval_s=settings.interval_s, most=settings.waiting_spans)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.ratio)),
            resource=Resource(dict(resource)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._sender)
        self._tracer = self._provider.get_tracer("lagrange")

    def begin(self, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """See Traces."""
        span = self._tracer.start_span(name, attributes=named(attributes), start_time=began_ns)
        return Recorded(self._tracer, span) if span.is_recording() else NO_SPAN

    def resume(self, context: str, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """See Traces."""
        around = W3C.extract({"traceparent": context})
        if not context or not around:
            return NO_SPAN
        span = self._tracer.start_span(name, around, attributes=named(attributes), start_time=began_ns)
        return Recorded(self._tracer, span) if span.is_recording() else NO_SPAN

    def counts(self) -> Mapping[str, int]:
        """See Traces."""
        return {"trace_spans_exported": self._sender.exported, "trace_spans_dropped": self._sender.dropped}

    def close(self) -> None:
        """See Traces."""
        self._sender.close(CLOSE_S)


def otlp_traces(settings: TracesSection, run: str, process: str) -> OtelTraces:
    """To the collector at settings.endpoint; OTEL_EXPORTER_OTLP_HEADERS may hold what it wants to be shown."""
    assert settings.endpoint is not None
    # The library would write a line for each try that failed; the sender writes one when that begins.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(f"{settings.endpoint.rstrip('/')}/v1/traces", timeout=settings.timeout_s)
    names = {"service.namespace": "lagrange", "service.name": process, "lagrange.run": run}
    return OtelTraces(settings, exporter, names)


def named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Attributes under names of ours."""
    return {PREFIX + name: value for name, value in attributes.items()}
