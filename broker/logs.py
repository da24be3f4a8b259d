"""Structured logs: one JSON object a line on standard error, each with run, process and version.

Invariant: configuring twice changes nothing but the bound fields, and no secret is ever a field.
"""

from __future__ import annotations

import sys

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
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(run=run_id, process=process, version=-1)


def bind_version(version: int) -> None:
    """Put the current policy version into every later line of this thread or task."""
    structlog.contextvars.bind_contextvars(version=version)
