"""Where an evaluation samples: an engine that nobody else uses, or the run's engines while they serve the version.

Invariant: samples come from the version that was prepared, or none do. On the run's engines an evaluation whose version
is no longer served is given up as a whole (`Superseded`): the answers that were in time would be the short ones.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from broker.errors import BrokerError
from broker.types import EngineRecord
from rollout.client import EngineClient, InvalidAnswer, Sample, Sampling
from rollout.engines import EnginePool
from rollout.evaluation.engine import EngineFailed
from rollout.evaluation.run import Superseded

Load = Callable[[Path, int], Awaitable[None]]


class Engines(Protocol):
    """As an evaluator sees them."""

    async def prepare(self, held: Path, version: int) -> None:
        """Serve a version. held: its files. Raises EngineFailed, Superseded."""

    async def generate(self, ids: Sequence[int], n: int, sampling: Sampling) -> list[Sample | InvalidAnswer]:
        """Samples of that version. Raises EngineError, EngineFailed, Superseded."""


class OwnEngine:
    """An engine that no registry knows. load: makes it serve a version, confirmed."""

    def __init__(self, client: EngineClient, load: Load) -> None:
        self._client, self._load = client, load

    async def prepare(self, held: Path, version: int) -> None:
        """See Engines."""
        await self._load(held, version)

    async def generate(self, ids: Sequence[int], n: int, sampling: Sampling) -> list[Sample | InvalidAnswer]:
        """See Engines."""
        return await self._client.generate(ids, n, sampling)


class SharedEngines:
    """The run's engines: weight-sync brings the versions, and takes them away."""

    def __init__(self, pool: EnginePool, patience_s: float) -> None:
        """patience_s: longest wait for an engine, in seconds."""
        self._pool, self._patience_s, self._version = pool, patience_s, -1

    async def prepare(self, held: Path, version: int) -> None:
        """See Engines; waits for weight-sync."""
        self._version = version
        await self._engine()

    async def generate(self, ids: Sequence[int], n: int, sampling: Sampling) -> list[Sample | InvalidAnswer]:
        """See Engines."""
        engine = await self._engine()
        self._pool.started(engine.engine_id, n)
        try:
            return await self._pool.client(engine).generate(ids, n, sampling)
        finally:
            self._pool.started(engine.engine_id, -n)

    async def _engine(self) -> EngineRecord:
        until = time.monotonic() + self._patience_s
        while True:
            engine, problem = None, "no engine serves it"
            try:
                engine = await self._pool.pick(at_least=self._version)
            except (BrokerError, TimeoutError) as error:  # without the registry no engine counts as confirmed
                problem = str(error)
            if engine is not None and engine.version > self._version:
                raise Superseded(f"the engines serve version {engine.version}, not {self._version} any more")
            if engine is not None:
                return engine
            if time.monotonic() > until:
                raise EngineFailed(f"version {self._version}: {problem} within {self._patience_s:g} s")
            await self._pool.changed(0.1)
