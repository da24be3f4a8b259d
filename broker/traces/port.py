"""What workers and the trainer know of traces: two Protocols, and an implementation of them that does nothing.

Invariant: nothing here raises, waits or imports OpenTelemetry unless traces are switched on, and a trace never decides
anything. The context travels as a W3C traceparent (`Group.trace`), "" where nothing is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from configs.load import ConfigError
from configs.schema import RunConfig

Value = str | int | float | bool
TRACEPARENT_BYTES = 55  # 00-<32 hex digits: trace>-<16: span>-<2: flags>


class Span(AbstractContextManager["Span"], Protocol):
    """A piece of work. As a context manager it ends with the body, and tells the class of what that raised.

    Times are nanoseconds since the epoch; None: now.
    """

    @property
    def context(self) -> str:
        """W3C traceparent of this span; "" if it is not recorded."""
        ...

    def child(self, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """A part of it, which the caller ends."""
        ...

    def event(self, name: str, **attributes: Value) -> None:
        """Something that happened in it now."""
        ...

    def end(self, problem: str = "", *, ended_ns: int | None = None, **attributes: Value) -> None:
        """It is over; a second call does nothing. problem: why it failed, "" if it did not."""
        ...


class Traces(Protocol):
    """Where spans go."""

    def begin(self, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """The first span of a new trace, or one that is not recorded: traces.ratio decides."""
        ...

    def resume(self, context: str, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """A span below one of another process. context: its traceparent; "" or anything else: not recorded."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Spans by what became of them, since the start: trace_spans_exported, trace_spans_dropped."""
        ...

    def close(self) -> None:
        """Send what waits, within a second; what does not arrive is counted as dropped."""
        ...


class NoSpan(AbstractContextManager["NoSpan"]):
    """A span that is not recorded."""

    context = ""

    def child(self, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """See Span."""
        return self

    def event(self, name: str, **attributes: Value) -> None:
        """See Span."""

    def end(self, problem: str = "", *, ended_ns: int | None = None, **attributes: Value) -> None:
        """See Span."""

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


NO_SPAN = NoSpan()


class NoTraces:
    """Traces that are switched off."""

    def begin(self, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """See Traces."""
        return NO_SPAN

    def resume(self, context: str, name: str, *, began_ns: int | None = None, **attributes: Value) -> Span:
        """See Traces."""
        return NO_SPAN

    def counts(self) -> Mapping[str, int]:
        """See Traces."""
        return {}

    def close(self) -> None:
        """See Traces."""


NO_TRACES = NoTraces()


def open_traces(config: RunConfig, process: str) -> Traces:
    """The traces that a process writes. Raises ConfigError if they are on and their packages are not installed."""
    if config.traces.endpoint is None:
        return NO_TRACES
    try:
        from broker.traces.otel import otlp_traces
    except ImportError as error:
        raise ConfigError(
            f"traces.endpoint is set, but {error.name} is not installed: pip install -r requirements/traces.txt, or "
            "set traces.endpoint: null."
        ) from error
    return otlp_traces(config.traces, config.run.id, process)


def trace_id(context: str) -> str:
    """The trace that a traceparent is of, as 32 hex digits, to look it up by; "" if there is none."""
    return context[3:35] if len(context) == TRACEPARENT_BYTES else ""
