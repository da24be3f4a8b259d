"""Where the monitor's answers come from: snapshots of the broker, at most one in `fresh_s`, and the steps' records.

Invariant: however many clients ask, Redis is asked at most once in `fresh_s` seconds (for each of two kinds of looks)
and by one thread. An answer was read at most `fresh_s` before it was asked for, or there is none (BrokerError): so who
waits for a slow Redis shares one read, and who waits for one that is away shares its failure. What is kept is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from broker.errors import BrokerError
from broker.types import Snapshot
from services.monitor.detail import FEW, SHOWN

WINDOW_S = 60.0
EARLIER_KEPT = 64


class Watched(Protocol):
    """The broker as the monitor sees it. Both raise BrokerError if Redis does not answer."""

    def snapshot(self, detail: int = 0, *, names: bool = False) -> Snapshot:
        """Everything at one instant; see broker.queue.Broker."""

    def metrics_history(self, limit: int) -> list[dict[str, Any]]:
        """Records of the last steps, newest first."""


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot, an earlier one (None: not seen) and the last steps' records, newest first.

    before: of about a minute ago, or of when the first engine served if that was later: what was waited for while a run
    started says nothing of how it goes.
    """

    snapshot: Snapshot
    before: Snapshot | None
    records: tuple[dict[str, Any], ...]


class Source:
    """Thread-safe."""

    def __init__(
        self,
        broker: Watched,
        *,
        fresh_s: float = 0.1,
        history_steps: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker, self._fresh_s, self._limit, self._clock = broker, fresh_s, history_steps, clock
        self._lock = threading.Lock()
        self._looks: dict[bool, tuple[float, Look]] = {}  # kind -> when its read began, and what it gave
        self._failed: tuple[float, BrokerError] | None = None
        self._last: Look | None = None
        self._earlier: deque[Snapshot] = deque(maxlen=EARLIER_KEPT)

    def look(self, full: bool = False) -> Look:
        """The present state. full: all events and dead letters, and who caused which lag. Raises BrokerError."""
        oldest = self._clock() - self._fresh_s
        with self._lock:
            at, seen = self._looks.get(full, (0.0, None))
            if seen is not None and at >= oldest:
                return seen
            if self._failed is not None and self._failed[0] >= oldest:
                raise BrokerError("Redis did not answer") from self._failed[1]
            began = self._clock()
            try:
                seen = self._last = self._read(self._last, full)
            except BrokerError as error:
                self._failed = (began, error)
                raise
            self._looks[full] = (began, seen)
            return seen

    def _read(self, last: Look | None, full: bool) -> Look:
        snapshot = self._broker.snapshot(SHOWN if full else FEW, names=full)
        if last is not None and not _continues(snapshot, last.snapshot):
            self._earlier.clear()
        if last is None or (snapshot.step, snapshot.epoch) != (last.snapshot.step, last.snapshot.epoch):
            records = tuple(r for r in self._broker.metrics_history(self._limit) if _up_to(r, snapshot.step))
        else:
            records = last.records
        if not self._earlier or snapshot.time_ms - self._earlier[-1].time_ms >= 1000 * WINDOW_S / (EARLIER_KEPT - 4):
            self._earlier.append(snapshot)
        recent = [s for s in self._earlier if snapshot.time_ms - s.time_ms <= 1000 * WINDOW_S]
        going = (s for s in recent if any(engine.routable for engine in s.engines))
        before = next(going, next(iter(recent), None))
        return Look(snapshot, before if before is not snapshot else None, records)


def _continues(now: Snapshot, before: Snapshot) -> bool:
    """Whether what counts up did: not if Redis was replaced, lost its tail or has another machine's clock."""
    return now.time_ms >= before.time_ms and now.groups.issued >= before.groups.issued


def _up_to(record: dict[str, Any], step: int) -> bool:
    """Whether a step record is of the surviving history as the snapshot knows it (it may be read a moment later)."""
    return isinstance(record.get("step"), int) and record["step"] <= step
