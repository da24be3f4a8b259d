"""Structured logs: one JSON object a line on standard error, each with run, process and version.

Invariant: configuring twice changes nothing but the bound fields, no secret is ever a field, and no log ends a process:
lines that a full disk refuses are counted, and the next one that it takes says how many.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import TextIO

import structlog


def configure_logs(run_id: str, process: str) -> None:
    """Set up logging of this process; call it once, at the entry point."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=Lines(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(run=run_id, process=process, version=-1)


def bind_version(version: int) -> None:
    """Put the current policy version into every later line of this thread or task."""
    structlog.contextvars.bind_contextvars(version=version)


class Lines:
    """Writes lines to a stream: a logger of structlog, and the factory that gives it. Raises nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lost, self._lock = stream, 0, threading.Lock()

    def __call__(self, *_: object) -> Lines:
        """The logger for whoever asks."""
        return self

    def msg(self, line: str) -> None:
        """Write a line, or count it."""
        with self._lock:
            if self._lost:
                told = {"event": "log lines could not be written", "lines": self._lost, "level": "warning"}
                line = f"{json.dumps(told)}\n{line}"
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
                self._lost = 0
            except OSError:
                self._lost += 1

    debug = info = warning = error = critical = exception = msg
