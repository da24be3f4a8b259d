"""When a process of a run ends: with the one that started it, or when it is asked to.

Invariant: a process that has called `die_with` is killed by the kernel (on Linux) when its parent ends, and goes no
further if that had happened before. rollout/guard.py does the same by itself, for it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # loaded here: between fork and exec is no place to load a library


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send us `by` when process `parent`, which started us, ends. May run between fork and exec."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def signals_noted(*numbers: signal.Signals) -> Iterator[list[int]]:
    """Each of these signals that comes goes into the list that is yielded; at the end the handlers are as before.

    A hang-up that is to be ignored since before we started (nohup) is.
    """
    noted: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, note) for number in numbers if not (number == signal.SIGHUP and ignored)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
