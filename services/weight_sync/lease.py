"""Who of several weight-sync processes acts.

Invariant: `leads` is true only while no other process can hold the role: the time counts from before the request that
renewed it, and Redis drops the holder only that many seconds after it arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import Callable

from broker.errors import BrokerError, NotInitialised
from services.weight_sync.ports import Registry

ROLE = "weight-sync"


class Lease:
    """The role of the run's leader. leader: who has it, "": not known."""

    def __init__(self, registry: Registry, seconds: float, clock: Callable[[], float]) -> None:
        self.identity = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.leader = ""
        self._registry, self._seconds, self._clock = registry, seconds, clock
        self._until = float("-inf")

    def leads(self) -> bool:
        """Whether this process may act on engines now."""
        return self._clock() < self._until

    def alone(self) -> bool:
        """Whether no other process is known to lead; then a pause of ours is ended even if Redis does not answer."""
        return self.leader in ("", self.identity)

    async def renew(self) -> bool:
        """Take or renew the role; False if another process has it. Raises BrokerError."""
        asked = self._clock()
        try:
            self.leader = await asyncio.to_thread(self._registry.hold, ROLE, self.identity, self._seconds)
        except NotInitialised:  # nothing can be registered before the run is initialised, so there is nothing to act on
            return True
        if self.leader == self.identity:
            self._until = asked + self._seconds
        return self.leader == self.identity

    async def give_up(self) -> None:
        """Let another process lead at once."""
        with contextlib.suppress(BrokerError):
            await asyncio.to_thread(self._registry.hold, ROLE, self.identity, 0)
