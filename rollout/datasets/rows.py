"""Rows of a JSON-lines file.

Invariant: a row that comes out passed the caller's reading; one that did not is named with file and line, and is an
error, or left out and counted, as the caller chose. The number of rows is known at the start, so indexes are stable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import structlog

LOG = structlog.get_logger()
T = TypeVar("T")
NAMED = 5  # malformed rows that are named one by one in the log
Malformed = Literal["error", "skip"]


class BadRow(ValueError):
    """A row that cannot be used; the text names file and line."""


class NotHere(BadRow):
    """This machine has no such file; another one may."""


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """The rows of a file that can be used, in its order. skipped: how many could not."""

    path: Path
    rows: tuple[T, ...]
    skipped: int = 0


def read_rows(path: Path, read: Callable[[Mapping[str, Any]], T | None], *, malformed: Malformed = "error") -> Rows[T]:
    """All rows of a .jsonl file through `read`, which raises ValueError or KeyError for a row that is no good.

    read gives None for a good row that is not wanted. malformed: "error" raises BadRow at the first bad row; "skip"
    leaves bad rows out and counts them. Raises BadRow too if the file cannot be read or has no row, and NotHere if
    there is none.
    """
    if malformed not in ("error", "skip"):
        raise BadRow(f"malformed is {malformed!r}, expected 'error' or 'skip'")
    rows: list[T] = []
    skipped = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = _row(line, read)
                except (ValueError, KeyError, TypeError) as error:
                    problem = f"{path}, line {number}: {_words(error)}"
                    if malformed == "error":
                        raise BadRow(f"{problem}. Mend it, or set malformed: skip.") from error
                    skipped += 1
                    if skipped <= NAMED:
                        LOG.warning("a row is left out", problem=problem)
                    continue
                if row is not None:
                    rows.append(row)
    except OSError as error:
        kind = NotHere if isinstance(error, FileNotFoundError | NotADirectoryError) else BadRow
        raise kind(f"{path}: cannot be read ({error.strerror}); put it there, or name another file") from error
    if not rows:
        raise BadRow(f"{path}: no row can be used ({skipped} malformed)")
    if skipped:
        LOG.warning("rows were left out", path=str(path), skipped=skipped, kept=len(rows))
    return Rows(path, tuple(rows), skipped)


def field(row: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted name, as in "reward_model.ground_truth". Raises KeyError with the whole name."""
    value: Any = row
    for name in dotted.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise KeyError(f"there is no field {dotted!r}")
        value = value[name]
    return value


def _row(line: bytes, read: Callable[[Mapping[str, Any]], T | None]) -> T | None:
    content = json.loads(line)
    if not isinstance(content, dict):
        raise TypeError(f"expected an object, found {type(content).__name__}")
    return read(content)


def _words(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
