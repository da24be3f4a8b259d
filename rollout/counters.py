"""What a worker counts: running totals, and what the ledger has not been told yet.

Invariant: the sum of all that `take` gave and was not put back, and what it would give now, is the total; so a count
that travels with a submission reaches the ledger once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Counters:
    """Numbers by name; docs/how-the-guarantees-work.md lists the names."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()

    def add(self, name: str, value: float = 1) -> None:
        """Add to a number."""
        self._totals[name] += value  # type: ignore[assignment]
        self._untold[name] += value  # type: ignore[assignment]

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
