"""Which engine gets the next request.

Invariant: only an engine that is routable (serving under a confirmed version) and new enough is chosen, and one that
could not be reached is left alone for SUSPECT_S. `choose` is pure; `EnginePool` keeps one client for each engine of the
registry, and of engines that are gone none that is idle; it looks at the registry when it was told that an engine
changed, and otherwise every REFRESH_S seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from broker.changes import Changes
from broker.types import EngineRecord
from rollout.client import EngineClient, EngineError
from rollout.ports import RolloutBroker
from rollout.threads import in_thread

REFRESH_S = 0.1
# A prefix is left behind for an engine that has less to do by more than so many samples and this factor: as much as it
# costs to compute a prompt again is soon lost in a longer batch, and small differences are noise.
SPARE, OVERLOADED = 16, 2.0
LOADS_EVERY_S = 1.0
SUSPECT_S = 1.0


def choose(
    engines: Iterable[EngineRecord], load: Mapping[str, float], *, at_least: int = 0, prefer: str | None = None
) -> EngineRecord | None:
    """The routable engine of version >= at_least with the smallest load; None if there is none.

    load: samples running on an engine, by id; unknown counts as 0. prefer: id of the engine that has the prefix in its
    cache; it is taken if it fits, unless its load is more than SPARE above the smallest and more than OVERLOADED times
    that. Ties go to the newer version, then to the smaller id.
    """
    fit = {record.engine_id: record for record in engines if record.routable and record.version >= at_least}
    if not fit:
        return None
    least = min(fit.values(), key=lambda r: (load.get(r.engine_id, 0.0), -r.version, r.engine_id))
    has, smallest = load.get(prefer or "", 0.0), load.get(least.engine_id, 0.0)
    too_busy = has - smallest > SPARE and has > OVERLOADED * smallest
    return least if too_busy else fit.get(prefer or "", least)


class EnginePool:
    """The engines of a run as one worker sees them."""

    def __init__(self, broker: RolloutBroker, connect: Callable[[str], EngineClient], timeout_s: float) -> None:
        """connect: base URL -> client. timeout_s: longest wait for the registry, in seconds."""
        self._broker, self._connect, self._timeout_s = broker, connect, timeout_s
        self._records: tuple[EngineRecord, ...] = ()
        self._clients: dict[tuple[str, str], EngineClient] = {}  # by id and address
        self._own: Counter[str] = Counter()
        self._elsewhere: dict[str, float] = {}
        self._suspect_until: dict[str, float] = {}
        self._seen = self._asked = float("-inf")
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._changes: Changes | None = None

    async def pick(self, *, at_least: int = 0, prefer: str | None = None) -> EngineRecord | None:
        """See `choose`. Raises what the broker raises, TimeoutError too."""
        async with self._lock:
            self._listen()
            if self._changed.is_set() or time.monotonic() - self._seen >= REFRESH_S:
                self._changed.clear()
                self._records = await in_thread(self._broker.engines, self._timeout_s)
                self._seen = time.monotonic()
                await self._forget()
            if time.monotonic() - self._asked >= LOADS_EVERY_S and sum(r.routable for r in self._records) > 1:
                await self._ask_for_loads()
        load = {r.engine_id: self._own[r.engine_id] + self._elsewhere.get(r.engine_id, 0.0) for r in self._records}
        now = time.monotonic()
        trusted = [r for r in self._records if self._suspect_until.get(r.engine_id, 0.0) <= now]
        return choose(trusted, load, at_least=at_least, prefer=prefer)

    @property
    def newest(self) -> int:
        """Largest version that an engine served at the last look, -1: none."""
        return max((record.version for record in self._records), default=-1)

    async def changed(self, timeout_s: float) -> None:
        """Return when an engine changed since the last look, or after timeout_s seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def client(self, record: EngineRecord) -> EngineClient:
        """The client of an engine."""
        key = record.engine_id, record.url
        if key not in self._clients:
            self._clients[key] = self._connect(record.url)
        return self._clients[key]

    def started(self, engine_id: str, samples: int) -> None:
        """So many samples of this worker run on the engine from now on; negative when they end."""
        self._own[engine_id] += samples

    def suspect(self, engine_id: str) -> None:
        """The engine could not be reached: leave it alone for SUSPECT_S seconds."""
        self._suspect_until[engine_id] = time.monotonic() + SUSPECT_S

    async def close(self) -> None:
        """Close all connections."""
        if self._changes is not None:
            self._changes.close()
        for client in self._clients.values():
            await client.close()

    async def _forget(self) -> None:
        """Let go of engines that left the registry or changed their address, once nothing of ours runs there."""
        known = {(record.engine_id, record.url) for record in self._records}
        for key in [key for key in self._clients if key not in known and not self._own[key[0]]]:
            await self._clients.pop(key).close()
        ids = {engine_id for engine_id, _ in known}
        for engine_id in [each for each, samples in self._own.items() if not samples and each not in ids]:
            del self._own[engine_id]
            self._suspect_until.pop(engine_id, None)

    def _listen(self) -> None:
        if self._changes is None:
            loop = asyncio.get_running_loop()

            def heard(_message: str) -> None:
                loop.call_soon_threadsafe(self._changed.set)

            self._changes = self._broker.listen(heard)

    async def _ask_for_loads(self) -> None:
        """What other workers run on each engine: what the engine says less what we run there."""
        routable = [record for record in self._records if record.routable]
        answers = await asyncio.gather(*(self._running(record) for record in routable))
        self._elsewhere = {
            r.engine_id: max(total - self._own[r.engine_id], 0.0) for r, total in zip(routable, answers, strict=True)
        }
        self._asked = time.monotonic()

    async def _running(self, record: EngineRecord) -> float:
        try:
            async with asyncio.timeout(2.0):
                return float(await self.client(record).running())
        except (EngineError, TimeoutError):
            return 1e9  # it does not answer: last choice
