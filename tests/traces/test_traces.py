"""Spans: their contexts, what is sampled, sent and dropped, and that all of it costs nothing while it is off."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry import trace as otel_api
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from broker.traces import NO_SPAN, NO_TRACES, open_traces, trace_id
from broker.traces.otel import OtelTraces
from broker.traces.sender import Sender
from configs.load import ConfigError
from configs.schema import TracesSection
from tests.broker.helpers import wait_for
from tests.conftest import ConfigFactory
from tests.traces.helpers import Memory, collector

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_span_of_another_process_follows_a_w3c_traceparent() -> None:
    here, there = Memory(), Memory()
    with here.traces.begin("group") as group:
        context = group.context
    there.traces.resume(context, "step").end()
    (sent,), (followed,) = here.finished(), there.finished()
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", context)
    assert sent.context is not None
    assert followed.context is not None
    assert followed.parent is not None
    assert followed.context.trace_id == sent.context.trace_id == int(trace_id(context), 16)
    assert followed.parent.span_id == sent.context.span_id


@pytest.mark.parametrize("context", ["", "rubbish", TRACEPARENT[:-1], "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_context_that_is_none_begins_no_trace(context: str) -> None:
    memory = Memory()
    assert memory.traces.resume(context, "step") is NO_SPAN
    assert memory.finished() == ()


def test_a_group_that_another_process_did_not_choose_stays_untraced() -> None:
    memory = Memory()
    memory.traces.resume(TRACEPARENT[:-1] + "0", "step").end()
    memory.traces.resume(TRACEPARENT, "step").end()
    assert len(memory.finished()) == 1


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (0.25, 150, 350), (1.0, 1000, 1000)])
def test_the_ratio_is_the_share_of_the_groups_that_is_traced(ratio: float, low: int, high: int) -> None:
    memory = Memory(ratio=ratio)
    spans = [memory.traces.begin("group") for _ in range(1000)]
    for span in spans:
        span.child("admit").end()
    traced = [span for span in spans if span.context]
    assert low <= len(traced) <= high
    assert len(memory.finished()) == len(traced)  # the children; the groups have not ended


def test_what_a_body_raises_is_told_by_its_class_alone() -> None:
    memory = Memory()
    with pytest.raises(ValueError, match="secret"), memory.traces.begin("group") as group, group.child("reward"):
        raise ValueError("secret")
    for span in memory.finished():
        assert (span.status.is_ok, span.status.description, len(span.events)) == (False, "ValueError", 0)


def test_a_second_end_changes_nothing() -> None:
    memory = Memory()
    with memory.traces.begin("group") as group:
        group.end("refused", ended_ns=5)
    (span,) = memory.finished()
    assert (span.end_time, span.status.description) == (5, "refused")


class Stuck(SpanExporter):
    """Takes nothing until it is let go, then what `result` says."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.go, self.result, self.called = threading.Event(), result, threading.Event()

    def export(self, spans: object) -> SpanExportResult:
        self.called.set()
        self.go.wait(60)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        """Nothing to do."""


def span() -> ReadableSpan:
    return ReadableSpan("group")


def test_no_more_spans_wait_than_may_and_the_rest_is_counted() -> None:
    exporter = Stuck()
    sender = Sender(exporter, interval_s=0.01, most=10)
    sender.on_end(span())
    assert exporter.called.wait(30)  # the first is on its way
    for _ in range(25):
        sender.on_end(span())
    assert (sender.exported, sender.dropped) == (0, 15)
    exporter.go.set()
    wait_for(lambda: sender.exported == 11)
    sender.close(30)
    assert (sender.exported, sender.dropped) == (11, 15)


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("an exporter's own fault")])
def test_an_exporter_in_trouble_costs_spans_and_nothing_else(result: SpanExportResult | Exception) -> None:
    exporter = Stuck(result)
    exporter.go.set()
    sender = Sender(exporter, interval_s=0.01, most=10)
    for _ in range(3):
        sender.on_end(span())
    wait_for(lambda: sender.dropped == 3)
    exporter.result = SpanExportResult.SUCCESS
    sender.on_end(span())
    sender.close(30)
    assert (sender.exported, sender.dropped) == (1, 3)


def test_closing_does_not_wait_for_an_exporter_that_hangs() -> None:
    exporter = Stuck()
    traces = OtelTraces(TracesSection(ratio=1, interval_s=0.01), exporter, {})
    traces.begin("first").end()
    assert exporter.called.wait(30)
    traces.begin("second").end()
    began = time.monotonic()
    traces.close()
    assert time.monotonic() - began < 30  # it hangs for a minute
    assert traces.counts()["trace_spans_dropped"] == 1
    exporter.go.set()


def test_a_collector_that_refuses_and_one_that_is_away_cost_spans_and_nothing_else(make_config: ConfigFactory) -> None:
    with collector() as server:
        server.status = 400
        settings = {"endpoint": server.endpoint, "ratio": 1.0, "interval_s": 0.01}
        traces = open_traces(make_config(traces={**settings, "timeout_s": 30.0}), "worker-0")
        traces.begin("group").end()
        wait_for(lambda: traces.counts()["trace_spans_dropped"] == 1)
        server.status = 200
        traces.begin("group").end()
        wait_for(lambda: traces.counts()["trace_spans_exported"] == 1)
        traces.close()
    # Nobody listens any more. The exporter tries again until its time is up: it is short here alone.
    traces = open_traces(make_config(traces={**settings, "timeout_s": 0.5}), "worker-0")
    traces.begin("group").end()
    wait_for(lambda: traces.counts()["trace_spans_dropped"] == 1)
    traces.close()


def test_no_provider_is_set_for_the_whole_process() -> None:
    Memory().traces.begin("group").end()
    assert not isinstance(otel_api.get_tracer_provider(), TracerProvider)


def test_traces_are_off_by_default_and_a_missing_package_is_one_message(
    make_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_traces(make_config(), "worker-0") is NO_TRACES
    monkeypatch.setitem(sys.modules, "broker.traces.otel", None)
    monkeypatch.delitem(sys.modules, "broker.traces.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install -r requirements/traces\.txt"):
        open_traces(make_config(traces={"endpoint": "http://127.0.0.1:4318"}), "worker-0")


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://ada:pass@collector:4318", "http://c:4318/?token=x"])
def test_an_address_that_is_none_or_holds_a_password_is_refused(endpoint: str, make_config: ConfigFactory) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        make_config(traces={"endpoint": endpoint})


def test_processes_without_traces_import_none_of_it() -> None:
    program = (
        "import sys, rollout.main, trainer.main\n"  # redis-py imports what it finds of the SDK's metrics
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
