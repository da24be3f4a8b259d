"""Reads runs/<id>/metrics.jsonl, one record for each optimizer step, while the trainer writes it.

Invariant: a line that is not yet whole is read later; after a resume the record of a step is the one written last.
Lines of the evaluator, {"evaluation": ...}, are no records of steps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs import ConfigError

Record = dict[str, Any]


def parse(lines: Iterable[str]) -> list[Record]:
    """Records by rising step; of two for one step the later counts, and lines that are no records are left out."""
    by_step: dict[int, Record] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            step = record["step"]
            by_step = {s: r for s, r in by_step.items() if s < step} if step in by_step else by_step
            by_step[step] = record
    return [by_step[step] for step in sorted(by_step)]


def read_metrics(path: Path) -> list[Record]:
    """All records of a file; none if it does not exist. Raises ConfigError if it cannot be read."""
    return parse(_lines(path))


def read_evaluations(path: Path, newest: int) -> list[Record]:
    """The last `newest` results of evaluations in a file, as `read_metrics` reads it, oldest first."""
    found = []
    for line in _lines(path):
        if line.startswith('{"evaluation"'):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line)["evaluation"])
    return [record for record in found if isinstance(record, dict)][-newest:]


def _lines(path: Path) -> list[str]:
    """What a disk damaged is a line that is no record."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). The run goes on without.") from error


def series_of(records: Iterable[Record], key: str) -> list[float]:
    """The numbers that records have under `key`."""
    return [float(r[key]) for r in records if isinstance(r.get(key), int | float) and not isinstance(r[key], bool)]


class MetricsTail:
    """What the terminal shows of every step so far, read as the file grows."""

    KEYS = ("step", "reward_mean", "step_s")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._offset = -1, 0  # its inode, and how far it was read
        self._by_step: dict[int, Record] = {}

    def series(self, key: str) -> list[float]:
        """One of KEYS by rising step."""
        return series_of((self._by_step[step] for step in sorted(self._by_step)), key)

    def read(self) -> None:
        """Take in what was appended since the last call, or all of the file that a resumed trainer put in its place.

        A file that is not there, or cannot be read for the moment, adds nothing.
        """
        try:
            with self._path.open("rb") as file:
                here = os.fstat(file.fileno())
                if here.st_ino != self._file or here.st_size < self._offset:
                    self._file, self._offset, self._by_step = here.st_ino, 0, {}
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        whole, _, _ = new.rpartition(b"\n")
        if not whole:
            return
        self._offset += len(whole) + 1
        for record in parse(whole.decode("utf-8", "replace").splitlines()):
            self._by_step[record["step"]] = {key: record.get(key) for key in self.KEYS}
