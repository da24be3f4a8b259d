"""A reward that does what it is told, for tests of the pool."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

from rollout.rewards.programs import Limits, run_program

SCRIBBLE = """
import os
for n in range(10**9):
    os.mkdir(str(n))
"""


def score(text: str, _answer: str, _metadata: dict[str, object]) -> float:
    if text == "hang":
        time.sleep(3600)
    if text.startswith("litter "):
        Path(text.removeprefix("litter ")).write_text(tempfile.mkdtemp())
        time.sleep(3600)
    if text.startswith("scribble "):
        Path(text.removeprefix("scribble ")).write_text(tempfile.gettempdir())
        run_program(SCRIBBLE, "", Limits(timeout_s=3600.0))
    if text == "busy":
        while True:
            pass
    if text == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "exit":
        os._exit(0)
    if text == "memory":
        return float(len(bytearray(8 << 30)))
    if text == "raise":
        raise ZeroDivisionError("on purpose")
    if text == "print":
        print("x" * 100_000)  # noqa: T201
    return float(text) if text != "print" else 1.0
