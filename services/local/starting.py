"""What is said of a run that waits for its first engine: by `up`, `status` and `watch` alike.

Invariant: `start_words` is pure; the log that it names exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.local.processes import last_words

LONG_S = 120.0
USUAL = "half a minute for a tiny model, minutes for a large one"


@dataclass(frozen=True, slots=True)
class StartLog:
    """What tells how far an engine's start is. name: in the run's folder, logs/sglang-0.log. end: its last line."""

    name: str
    end: str


def start_log(folder: Path) -> StartLog | None:
    """Of the logs of SGLang and of its supervisor the one that was written last; None before there is any.

    A log of SGLang may be of a session before: then the supervisor's is newer.
    """
    found = []
    for file in (folder / "logs" / "engine-0.log", *folder.glob("logs/sglang-0*.log")):
        try:
            found.append((file.stat().st_mtime_ns, file))
        except FileNotFoundError:
            continue
    if not found:
        return None
    newest = max(found)[1]
    return StartLog(str(newest.relative_to(folder)), last_words(newest))


def start_words(elapsed_s: float | None, log: StartLog | None) -> str:
    """What is said of the engines while there is none. elapsed_s: of the start; None (and no log): not known here."""
    if elapsed_s is None or elapsed_s < LONG_S:
        return "starting" + (f", log: {log.name}" if log else "") + f" ({USUAL})"
    last = f"; {log.name} ends: {log.end or 'it is empty'}" if log else ""
    return f"starting for {duration(elapsed_s)}, which is long for a small model{last}"


def duration(seconds: float) -> str:
    """Seconds as 0:42 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"
