"""Writes one record a step to runs/<id>/metrics.jsonl.

Invariant: every line is one whole JSON object without NaN or infinity; after a resume the file holds no step beyond the
checkpoint, so that each step of the surviving history appears once. The evaluator adds lines of its own (rollout/
evaluation/follow.py), which are kept and dropped with their steps.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.ports import MetricsSink


def json_safe(value: Any) -> Any:
    """The same tree with null for every number that JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


class JsonLines:
    """Appends to a file, line by line."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open `path`, first dropping records of steps beyond `resume_step` and a torn last line.

        Raises OSError, which names the file.
        """
        self._path = path
        with _named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [line for line in _lines(path) if (step := _step_of(line)) is not None and step <= resume_step]
            aside = path.with_suffix(".tmp")
            aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            aside.replace(path)
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, object]) -> None:
        """One line; on disk in the sense that a killed process does not lose it. Raises OSError, which names it."""
        line = json.dumps(json_safe(record), allow_nan=False).encode() + b"\n"
        with _named(self._path):
            if self._file.write(line) != len(line):  # full in the middle; the next start drops what is there
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Several:
    """Hands each record to several sinks."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = sinks

    def write(self, record: Mapping[str, object]) -> None:
        """To every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an error say which file it is of: one of a write does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _lines(path: Path) -> list[str]:
    """What a disk damaged is a line that is no record."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _step_of(line: str) -> int | None:
    """Of a step's record, or of the version that an evaluation scored ({"evaluation": {"step": ...}})."""
    try:
        record = json.loads(line)
        step = record.get("evaluation", record)["step"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return step if isinstance(step, int) else None
