"""A rank that leaves its process id in a folder, and then fails (rank 1 of "fail") or waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """arguments: folder, "fail" or "wait"."""
    folder, what = arguments
    rank = os.environ["RANK"]
    (Path(folder) / f"rank-{rank}").write_text(str(os.getpid()))
    if what == "fail" and rank == "1":
        while not (Path(folder) / "rank-0").exists():
            signal.sigtimedwait([], 0.05)
        return 7
    signal.pause()
    return 0
