"""Work that a step starts and does not wait for: writing weights and checkpoints.

Invariants: jobs run one at a time in the order in which they were handed in, so a commit follows its checkpoint and an
announcement its weights, and ranks that hand in the same jobs meet in the same collectives. After a job fails none that
was handed in later is begun, and its error is raised at the next word with `check`, `submit` or `wait`. At most one job
of a name is unfinished: there is never more than one copy of the weights in memory per name.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

Job = Callable[[], object]


class Background(Protocol):
    """Where the loop hands in its jobs."""

    def submit(self, name: str, prepare: Callable[[], Job]) -> None:
        """Wait until no job of this name is left, call `prepare` here and now, and run what it returns later."""
        ...

    def check(self) -> None:
        """Raise the error of a job that failed."""
        ...

    def wait(self) -> None:
        """Return when all jobs are done; raise the error of one that failed."""
        ...

    def close(self, patience_s: float) -> bool:
        """Begin no further job; True if the running one ended within `patience_s` seconds. Raises nothing."""
        ...


class Inline:
    """Runs each job at once, in the caller: for tests, and where determinism counts more than time."""

    def submit(self, name: str, prepare: Callable[[], Job]) -> None:
        """Prepare and run."""
        prepare()()

    def check(self) -> None:
        """Nothing can have failed unseen."""

    def wait(self) -> None:
        """Nothing is left to do."""

    def close(self, patience_s: float) -> bool:
        """Nothing is running."""
        return True


class Worker:
    """One daemon thread. To be used from one other thread.

    limit_s: longest wait for jobs, in seconds; then TimeoutError.
    """

    def __init__(self, limit_s: float = 3600.0) -> None:
        self._limit_s = limit_s
        self._jobs: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._left: list[str] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="trainer-background", daemon=True)
        self._thread.start()

    def submit(self, name: str, prepare: Callable[[], Job]) -> None:
        """See the protocol."""
        self._until(lambda: name not in self._left)
        job = prepare()
        with self._changed:
            self._left.append(name)
        self._jobs.put((name, job))

    def check(self) -> None:
        """See the protocol."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """See the protocol."""
        self._until(lambda: not self._left)

    def _until(self, true: Callable[[], bool]) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self._error is not None or true(), self._limit_s)
        self.check()
        if not done:
            raise TimeoutError(f"not written within {self._limit_s} s: {', '.join(self._left)}")

    def close(self, patience_s: float) -> bool:
        """See the protocol."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            structlog.get_logger(__name__).warning("background.abandoned", jobs=self._left, patience_s=patience_s)
            return False
        return True

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            name, job = item
            if self._error is None and not self._closed:
                try:
                    job()
                except BaseException as error:  # whatever it is, it belongs to the thread that handed the job in
                    self._error = error
            del job, item  # the copy of the weights goes now, not when the next job comes
            with self._changed:
                self._left.remove(name)
                self._changed.notify_all()
