"""Traces: one from a prompt to the optimizer step that trains it. Callers know `port` alone; off, they cost nothing."""

from broker.traces.port import NO_SPAN, NO_TRACES, Span, Traces, open_traces, trace_id

__all__ = ["NO_SPAN", "NO_TRACES", "Span", "Traces", "open_traces", "trace_id"]
