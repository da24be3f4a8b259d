"""A rollout worker for the pool's test: notes its lives beside the file that it is given; number 1 fails once."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """arguments: --worker, file, index."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    index, lives = arguments[2], Path(arguments[1]).parent / "lives"
    life = len(list(lives.glob(f"{index}-*")))
    (lives / f"{index}-{life}").write_text(str(os.getpid()))
    if index == "1" and life == 0:
        return 1
    signal.sigwait({signal.SIGTERM})
    (lives / f"left-{index}").touch()
    return 0
