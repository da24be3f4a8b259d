"""Starts and ends the processes of a local run.

Invariant: each process leads its own group, is announced to the guardian before it does anything, and dies with its
parent (configs/lifetime.py); `stop` returns within its budget with every group gone, asking first and killing then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from configs.lifetime import die_with

WARNING = re.compile(r"^\S+:\d+: \w*Warning: |^\s+warnings\.warn\(")  # and the line of code that follows it


@dataclass(slots=True)
class Child:
    """One running process. name: "worker-0"; log: where its output goes; its group id is its process id."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while it runs, else its exit code (negative: the signal that ended it)."""
        return self.process.poll()


class Processes:
    """The processes of one run, and the guardian that outlives `up` for the moment it takes to kill them."""

    def __init__(self, logs: Path) -> None:
        """logs: folder of the log files; it must exist. Starts the guardian."""
        self._logs = logs
        self._children: dict[str, Child] = {}
        self._guardian = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).with_name("guardian.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def children(self) -> Mapping[str, Child]:
        """What was started and not yet taken away, by name."""
        return self._children

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Start `command` under `name`; its output is appended to <logs>/<name>.log.

        environment: added to our own. Raises OSError if the program cannot be started or the log cannot be written.
        """
        path = self._logs / f"{name}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - `up` starts everything from its only thread
                start_new_session=True,
            )
        child = Child(name, process, path)
        self._children[name] = child
        self.watch_group(process.pid)
        return child

    def watch_group(self, group: int) -> None:
        """Have the guardian kill this process group should `up` die."""
        self._tell(f"+{group}\n")

    def forget(self, name: str) -> None:
        """Take away a process that ended, and kill what it left behind in its group."""
        child = self._children.pop(name)
        _kill_group(child.pid, signal.SIGKILL)
        self._tell(f"-{child.pid}\n")

    def stop(self, names: Sequence[str], budget_s: float) -> None:
        """End the named processes: SIGTERM to each group, and SIGKILL to what is left after budget_s seconds."""
        children = [self._children[name] for name in names if name in self._children]
        for child in children:
            if child.exit_code() is None:
                _kill_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + budget_s
        while time.monotonic() < deadline and any(child.exit_code() is None for child in children):
            time.sleep(0.02)
        for child in children:
            _kill_group(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=2.0)
            self.forget(child.name)

    def close(self) -> None:
        """End the guardian; call it last, when every process has ended."""
        if self._guardian.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(timeout=2.0)

    def _tell(self, line: str) -> None:
        pipe: IO[bytes] | None = self._guardian.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(line.encode())
                pipe.flush()


def _kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def explain_log(log: Path, lines: int = 8) -> str:
    """Why a process ended, from the end of its log: its last error record, or its last lines."""
    last = _last_lines(log, lines)
    for line in reversed(last):
        record = _record(line)
        if record.get("level") in ("error", "critical"):
            return _words(record)
    return "\n".join(last)


def last_words(log: Path) -> str:
    """The last line of a log that is no warning of Python's, at most 200 characters, of a record what it says; "" if
    there is none."""
    lines = [line for line in _last_lines(log, 200) if not WARNING.search(line)]
    return ((_words(_record(lines[-1])) or lines[-1].strip()) if lines else "")[:200]


def _last_lines(log: Path, number: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-number:]


def _words(record: dict[str, object]) -> str:
    return ": ".join(str(record[key]) for key in ("event", "problem", "error", "detail") if record.get(key))


def _record(line: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
