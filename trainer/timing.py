"""Where the time of a step goes.

Invariant: the parts are disjoint, so their sum is at most the step's wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARTS = (
    "wait_s", "fetch_s", "pack_s", "log_prob_s", "forward_backward_s", "optimizer_s", "export_s", "checkpoint_s",
)  # fmt: skip


class Stopwatch:
    """Adds up seconds by part of the step. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the body under `part`."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[part] += self._clock() - start

    @property
    def total(self) -> float:
        """Seconds since this stopwatch was made."""
        return self._clock() - self._start
