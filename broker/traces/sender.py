"""Sends finished spans from a thread of its own.

Invariant: `on_end` never waits and never raises; at most `most` spans wait; each span that ended is exported, waits, or
is counted as dropped (no room, or the collector did not take it); `close` returns within its time.
"""

from __future__ import annotations

import threading
from collections import deque

import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = structlog.get_logger()
BATCH = 512


class Sender(SpanProcessor):
    """exported, dropped: spans so far."""

    def __init__(self, exporter: SpanExporter, *, interval_s: float, most: int) -> None:
        """exporter: whose export ends within a finite time. interval_s: longest wait of a span, unless many wait."""
        self.exported = self.dropped = 0
        self._exporter, self._interval_s, self._most = exporter, interval_s, most
        self._waiting: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._closing = self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span, or count it as dropped."""
        with self._changed:
            if self._closing or len(self._waiting) >= self._most:
                self.dropped += 1
                return
            self._waiting.append(span)
            if len(self._waiting) >= BATCH:
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Send what waits, for so many seconds at most; the rest is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self._exporter.shutdown()  # a call under way gives up
        with self._changed:
            self.dropped += len(self._waiting)
            self._waiting.clear()

    def _run(self) -> None:
        while batch := self._next():
            accepted = self._export(batch)
            with self._changed:
                self.exported += len(batch) if accepted else 0
                self.dropped += 0 if accepted else len(batch)
            if accepted is self._failing:  # one line when it begins and one when it ends
                self._failing = not accepted
                log.warning("spans are dropped" if self._failing else "spans are taken again", dropped=self.dropped)

    def _next(self) -> list[ReadableSpan]:
        """The next spans, as soon as it is time; none at the end."""
        with self._changed:
            while not self._closing:
                self._changed.wait_for(lambda: self._closing or len(self._waiting) >= BATCH, self._interval_s)
                if self._waiting:
                    break
            return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _export(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever an exporter does, training goes on
            log.warning("exporter failed", problem=f"{type(error).__name__}: {error}")
            return False
