"""A rank for the launchers' tests, without torch: notes each of its lives, and does what it is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from trainer.launch import STOPPED

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: Sequence[str]) -> int:
    """arguments: folder, and "end", "wait" (for a signal), "checkpoint" (which a signal begins and the file `go` ends),
    "fatal", "again" or "die": these three concern rank 1 in its first life alone."""
    if arguments[1] == "checkpoint":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    folder, what = Path(arguments[0]), arguments[1]
    rank = int(os.environ["RANK"])
    life = len(list(folder.glob(f"rank-{rank}-*")))
    note = {name: os.environ[name] for name in NAMES} | {"pid": os.getpid()}
    (folder / f"rank-{rank}-{life}").write_text(json.dumps(note))
    if what == "end" or (life and what != "wait"):
        return 0
    if rank == 1 and what in ("again", "die", "fatal"):
        while not (folder / "rank-0-0").exists():
            signal.sigtimedwait([], 0.02)
        if what != "die":
            return 1 if what == "again" else 3
        os.kill(os.getpid(), signal.SIGKILL)
    signal.sigwait({signal.SIGTERM})
    if what == "checkpoint":
        (folder / f"asked-{rank}").touch()
        while not (folder / "go").exists():
            signal.sigtimedwait([], 0.02)
        (folder / f"saved-{rank}").touch()
        return STOPPED
    return 0
