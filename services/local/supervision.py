"""What to do when a process ends, and what to say at the end: the policy of `lagrange up`, as pure functions.

Invariant: a process is started again at most `RestartPolicy.tries` times within `window_s`; the delay before each start
grows and is bounded; the trainer's own word (a finished run, a fatal error) ends the run instead. No clock and no
process is touched here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from services.options import program

FATAL = 3  # exit code by which a command says: starting me again cannot help (docs/run-it.md)
USAGE = 2  # exit code of a configuration that cannot be used
STOPPED = 130  # exit code after Ctrl-C, as shells use it


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """tries: restarts within window_s seconds. first_delay_s doubles with each of them, up to longest_delay_s."""

    tries: int = 5
    window_s: float = 120.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0


@dataclass(frozen=True, slots=True)
class History:
    """When a process was started again (seconds of a monotonic clock) within the window, and how often in all."""

    restarts: tuple[float, ...] = ()
    total: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again at `at` (monotonic seconds)."""

    at: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Its work is done; do not start it again."""


@dataclass(frozen=True, slots=True)
class End:
    """End the run. code: exit code of `lagrange up`. why: one sentence for the user."""

    code: int
    why: str
    status: Literal["finished", "failed"]


@dataclass(frozen=True, slots=True)
class News:
    """What happened last. at: when, from where its age counts (monotonic seconds).

    ended_epoch: of a trainer that ended, its epoch: that is news until another has attached, however long it takes, and
    its age counts from then. None: of anything else.
    """

    text: str = ""
    at: float = 0.0
    ended_epoch: int | None = None

    def seen(self, epoch: int, now: float) -> News:
        """The news when the run's epoch is `epoch`: one grows with each trainer that attaches."""
        if self.ended_epoch is None:
            return self
        return replace(self, at=now, ended_epoch=None if epoch > self.ended_epoch else self.ended_epoch)


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended. code: its exit code (negative: the signal). finished: how the run ended, "" if it goes on.
    served: it did its work at least once, so that its end is not a failure to start."""

    name: str
    code: int
    finished: str = ""
    served: bool = True


def after_exit(ended: Ended, history: History, now: float, policy: RestartPolicy) -> Restart | Leave | End:
    """Decide what follows when a process ended.

    history: its restarts so far. now: monotonic seconds. A process that ends with 0 before the run is finished is
    started again, since the run still needs it; afterwards it is left alone, and the trainer's end is the run's.
    """
    name, code = ended.name, ended.code
    if code == 0 and ended.finished:
        return End(0, ended.finished, "finished") if name == "trainer" else Leave()
    if code in (FATAL, USAGE):
        return End(code, f"{name} cannot go on ({describe_exit(code)})", "failed")
    if name.startswith("engine") and not ended.served:
        return End(1, f"{name} did not start ({describe_exit(code)})", "failed")
    recent = recent_restarts(history, now, policy)
    if len(recent) >= policy.tries:
        return End(
            1,
            f"{name} ended {len(recent) + 1} times within {policy.window_s:.0f} s (last: {describe_exit(code)})",
            "failed",
        )
    delay = min(policy.first_delay_s * 2 ** len(recent), policy.longest_delay_s)
    return Restart(now + delay)


def recorded(history: History, at: float, now: float, policy: RestartPolicy) -> History:
    """The history with a restart at `at` added and what left the window forgotten."""
    return replace(history, restarts=(*recent_restarts(history, now, policy), at), total=history.total + 1)


def recent_restarts(history: History, now: float, policy: RestartPolicy) -> tuple[float, ...]:
    """Restarts within the window that ends at `now`."""
    return tuple(at for at in history.restarts if now - at < policy.window_s)


def describe_exit(code: int) -> str:
    """An exit code in words: "exit code 1", "signal 9"."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def farewell(end: End, folder: Path, given_up: Sequence[str] = ()) -> str:
    """The last words of `up`: how the run ended, and what to do.

    given_up: why prompts became dead letters, the newest last.
    """
    resume = f"{program()} up --resume {folder}"
    words = _farewell(end, folder, resume)
    if not given_up:
        return words
    return (
        f"{words}\n{len(given_up)} of its prompts are dead letters (the newest for: {given_up[-1]}). A resume does not "
        f"issue them again, but for: {resume} --requeue"
    )


def _farewell(end: End, folder: Path, resume: str) -> str:
    if end.status == "finished":
        return f"Finished: {end.why}. Report: {folder / 'report.html'}"
    if end.code == STOPPED:
        return f"Stopped. Go on with: {resume}"
    if end.code in (USAGE, FATAL):
        return (
            f"Failed: {end.why}\nAs it is, it would fail again. Mend the cause; where that is a field, go on with: "
            f"{resume} --set NAME=VALUE"
        )
    return f"Failed: {end.why}\nGo on with: {resume}"
