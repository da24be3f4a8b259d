"""Waits for a batch, and tells all ranks which it is.

Invariant: no rank waits longer than the patience of one round without a word, so a long starvation never looks like a
dead rank; the wait is measured, with its reason. It ends where no step can be filled any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from broker.errors import BrokerUnavailable
from broker.types import PAST_THE_END_MS, Delivery, Refused, Snapshot

if TYPE_CHECKING:
    from trainer.ports import Ranks  # imports torch

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class Choice:
    """deliveries: the batch of the next step. reason: why it was waited for, longest first; "" if it was not.
    now_ms: the server's time. asked: the step at which an operator asked for a checkpoint, -1: none did."""

    deliveries: tuple[Delivery, ...]
    reason: str
    now_ms: int
    asked: int = -1


class PromptsEnded(Exception):
    """The data set has ended, and what is left of its groups fills no step."""


@dataclass(slots=True)
class EndOfPrompts:
    """Whether the data set has ended and no step of `groups` groups can be filled any more; asked while one waits.

    A worker is given a prompt past the end only when none waits to be issued again: these come first (admit.lua). If
    nothing was being generated before that, and nothing is now, no group can come.
    """

    snapshot: Callable[[], Snapshot]
    groups: int
    _quiet_since_ms: int | None = field(default=None, init=False)

    def __call__(self) -> bool:
        seen = self.snapshot()
        if seen.groups.generating or seen.groups.ready >= self.groups:
            self._quiet_since_ms = None
            return False
        if self._quiet_since_ms is None:
            self._quiet_since_ms = seen.time_ms
        said = (float(stats.get(PAST_THE_END_MS, -1)) for stats in seen.workers.values())
        return max(said, default=-1) > self._quiet_since_ms


def no_first_step(seen: Snapshot, groups: int) -> str:
    """What is said of a run whose prompts ended before its first step of `groups` groups. seen: with some detail."""
    ended = f"the data set ended before the first step had its {groups} groups"
    if not seen.dead_letters:
        return f"{ended}. Lower trainer.groups_per_step, or give the task more prompts or epochs (task.parameters)."
    newest = seen.detail.dead[0].reason if seen.detail and seen.detail.dead else "unknown"
    return (
        f"{ended}: {seen.dead_letters} of its prompts are dead letters, which were given up and are not issued again "
        f"(the newest for: {newest}). Mend that, then issue them again: all by `lagrange up --resume RUN --requeue`, "
        "or, where Redis goes on without `up`, each by `lagrange groups requeue`."
    )


class Message(msgspec.Struct, frozen=True):
    """What the main rank says. kind: "batch", "wait" (ask again), "stop" or "ended" (no batch will come)."""

    kind: str
    deliveries: tuple[Delivery, ...] = ()
    reason: str = ""
    now_ms: int = 0
    asked: int = -1


class Doorbell:
    """A pause that ends early once the queue has said that a batch may be there."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self, _message: str = "") -> None:
        """End the pause, or the next one if there is none; from any thread."""
        self._rung.set()

    def pause(self, seconds: float) -> None:
        """Return after so many seconds, or as soon as it rings."""
        self._rung.wait(seconds)
        self._rung.clear()


class Chooser:
    """Polls the queue on the main rank; made anew for each step."""

    def __init__(
        self,
        *,
        pull: Callable[[], tuple[Delivery, ...] | Refused],
        now_ms: Callable[[], int],
        asked: Callable[[], int],
        stop: Callable[[], bool],
        ended: Callable[[], bool],
        clock: Callable[[], float],
        pause: Callable[[float], None],
        patience_s: float,
        give_up_s: float,
    ) -> None:
        """ended: whether no batch will come; asked once a round. pause: returns after so many seconds, or earlier.
        patience_s: longest time of one round. give_up_s: longest time that the server may be away before its error is
        raised."""
        self._pull, self._now_ms, self._asked, self._stop, self._ended = pull, now_ms, asked, stop, ended
        self._clock, self._pause = clock, pause
        self._patience_s, self._give_up_s = patience_s, give_up_s
        self._pause_s = FIRST_PAUSE_S
        self._away_since: float | None = None
        self._waited: dict[str, float] = {}

    def next(self) -> Message:
        """A batch, "stop" once asked to, or, when the round is over, "ended" or "wait"."""
        end = self._clock() + self._patience_s
        while True:
            if self._stop():
                return Message("stop")
            answer = self._ask()
            if not isinstance(answer, Refused):
                reasons: Sequence[str] = sorted(self._waited, key=lambda r: -self._waited[r])
                return Message("batch", answer, reasons[0] if reasons else "", self._now_ms(), self._asked())
            began = self._clock()
            self._pause(self._pause_s)
            self._waited[answer.reason] = self._waited.get(answer.reason, 0.0) + self._clock() - began
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if self._clock() >= end:
                return Message("ended" if self._over() else "wait")

    def _over(self) -> bool:
        try:
            return self._ended()
        except BrokerUnavailable:  # `_ask` has the patience for that
            return False

    def _ask(self) -> tuple[Delivery, ...] | Refused:
        try:
            answer = self._pull()
        except BrokerUnavailable as error:
            now = self._clock()
            self._away_since = now if self._away_since is None else self._away_since
            if now - self._away_since >= self._give_up_s:
                raise
            return Refused("unavailable", str(error))
        self._away_since = None
        return answer


def share_choice(ranks: Ranks, choose: Callable[[], Message] | None) -> Choice | None:
    """The main rank's choice on every rank; None if the trainer is to stop. Collective.

    choose: given on the main rank alone. Raises PromptsEnded on all ranks alike.
    """
    while True:
        payload = msgspec.json.encode(choose()) if choose is not None else None
        message = msgspec.json.decode(ranks.broadcast_bytes(payload), type=Message)
        if message.kind == "stop":
            return None
        if message.kind == "ended":
            raise PromptsEnded
        if message.kind == "batch":
            return Choice(message.deliveries, message.reason, message.now_ms, message.asked)
