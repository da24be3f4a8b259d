"""How weights get into an engine: three ways behind one interface.

Invariant, of each: `ready` is asked while the engine serves, and begins nothing that its requests would wait for, but
for a handshake; `load` answers `Done` only if the engine said that it holds all of the version under the name that it
was given. What it holds is then read back, the same way for all three (member.py). Where a way does not work, the
engine loads the published files, which are always there; that is counted in `fallbacks`.
"""

from __future__ import annotations

from typing import Protocol

from broker.types import EngineRecord
from services.weight_sync.engine_client import Done, EngineClient, Lost
from services.weight_sync.staging import Staged


class Transport(Protocol):
    """fallbacks: loads of the published files where another way was wanted. one_call: a load is one request, which the
    engine carries out under its own lock; else it has to be paused meanwhile."""

    fallbacks: int
    one_call: bool

    def ready(self, engine: EngineRecord, client: EngineClient, staged: Staged, waited_s: float) -> bool:
        """Whether all is done that can be before the engine is taken out; starts doing it.

        waited_s: since it was not, for this version or for those before it.
        """
        ...

    async def load(
        self, engine: EngineRecord, client: EngineClient, staged: Staged, name: str, *, drain: bool
    ) -> Done[None] | Lost:
        """Bring a staged version into the engine, flush its cache, and call the weights `name`."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class Disk:
    """Engines read the published files, from a folder that they share with the trainer."""

    one_call = True

    def __init__(self) -> None:
        self.fallbacks = 0

    def ready(self, engine: EngineRecord, client: EngineClient, staged: Staged, waited_s: float) -> bool:
        """Staging has brought the files into the page cache."""
        return True

    async def load(
        self, engine: EngineRecord, client: EngineClient, staged: Staged, name: str, *, drain: bool
    ) -> Done[None] | Lost:
        """See Transport."""
        return await client.load(staged.folder, name, drain=drain)

    async def close(self) -> None:
        """Nothing is held."""


class Delta:
    """Engines read a copy on their own host, which their supervisor makes from what changed (rollout/local_copy.py).

    An engine without such a copy within `wait_s` seconds (no supervisor, a full disk) loads the published files.
    """

    one_call = True

    def __init__(self, wait_s: float) -> None:
        self.fallbacks = 0
        self._wait_s = wait_s

    def ready(self, engine: EngineRecord, client: EngineClient, staged: Staged, waited_s: float) -> bool:
        """Whether the copy is there, or nobody makes one (no supervisor), or it was waited for long enough."""
        return engine.staged == staged.version or engine.pid == 0 or waited_s >= self._wait_s

    async def load(
        self, engine: EngineRecord, client: EngineClient, staged: Staged, name: str, *, drain: bool
    ) -> Done[None] | Lost:
        """See Transport."""
        local = engine.staged == staged.version
        self.fallbacks += not local
        return await client.load(engine.staged_path if local else staged.folder, name, drain=drain)

    async def close(self) -> None:
        """Nothing is held."""
