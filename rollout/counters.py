"""What a worker counts: running totals, and what the ledger has not been told yet; of failures the newest reason, too.

Invariant: the sum of all that `take` gave and was not put back, and what it would give now, is the total; so a count
that travels with a submission reaches the ledger once. However often something fails, the log is told of it at once the
first time, and then at most once in TELL_EVERY_S, with how often.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from broker.types import NEWEST

TELL_EVERY_S = 60.0


class Counters:
    """Numbers by name; docs/how-the-guarantees-work.md lists the names."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, for how often a log is told."""
        self._clock = clock
        self._newest: dict[str, str] = {}
        self._told: dict[str, tuple[float, float]] = {}  # when the log was told of a failure, and the total by then
        self._totals: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()

    def add(self, name: str, value: float = 1) -> None:
        """Add to a number."""
        self._totals[name] += value  # type: ignore[assignment]
        self._untold[name] += value  # type: ignore[assignment]

    def fail(self, name: str, problem: str) -> int:
        """Count a failure, and keep `problem` as the newest of its name.

        How many there were since the log was to be told last, if it is to be told now; else 0.
        """
        self.add(name)
        self._newest[name] = problem
        now, (at, told) = self._clock(), self._told.get(name, (float("-inf"), 0))
        if now - at < TELL_EVERY_S:
            return 0
        self._told[name] = (now, self._totals[name])
        return round(self._totals[name] - told)

    def newest(self) -> dict[str, str]:
        """The newest problem of each failure, under its name with NEWEST."""
        return {f"{name}{NEWEST}": problem for name, problem in self._newest.items()}

    def take(self) -> dict[str, float]:
        """What was added since the last time; give it to `put_back` if it did not arrive."""
        taken = {name: float(value) for name, value in self._untold.items() if value}
        self._untold.clear()
        return taken

    def put_back(self, taken: Mapping[str, float]) -> None:
        """Undo a `take`."""
        for name, value in taken.items():
            self._untold[name] += value  # type: ignore[assignment]

    def totals(self) -> dict[str, float]:
        """All numbers since the start."""
        return {name: float(value) for name, value in self._totals.items()}
