"""Ends every process group of a run when the process that started them is gone, even by kill -9.

Invariant: no process of a run outlives `lagrange up` by more than a moment. `up` holds the write end of a pipe; this
program holds the read end as its standard input and learns of groups by lines `+123` and `-123`. The pipe closes when
`up` ends in whatever way, and then each group still listed is killed. Run as a script: it imports the standard library
alone, so that it is ready within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def living_groups(lines: Iterable[str]) -> set[int]:
    """The groups that were announced and not taken back; lines that are neither are ignored."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if not number.isdigit() or int(number) <= 1:
            continue
        if sign == "+":
            groups.add(int(number))
        elif sign == "-":
            groups.discard(int(number))
    return groups


def main() -> None:
    """Read standard input to its end, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in living_groups(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
