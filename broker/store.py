"""Where payloads lie: a port, and its implementation by Redis keys.

Invariant: bytes become visible under a group's id only through the submit transition; bytes that were staged for a
submission that never came disappear by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from broker.connection import Connection
from broker.keys import Keys

STAGED_MS = 600_000


class PayloadStore(Protocol):
    """Payloads by group id. The transitions of broker/lua move and free them where they are Redis keys."""

    def stage(self, group_id: int, data: bytes) -> str:
        """Store bytes aside; returns the name to hand to the submit transition. OutOfMemory if there is no room."""
        ...

    def fetch(self, group_ids: Sequence[int]) -> list[bytes | None]:
        """Bytes of accepted groups, None where there are none."""
        ...


class RedisPayloadStore:
    """One Redis key for each payload, in the run's own slot."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    def stage(self, group_id: int, data: bytes) -> str:
        """See PayloadStore; a staged payload expires after ten minutes."""
        name = self._keys.staged(group_id)
        self._connection.attempt(lambda: self._connection.client.set(name, data, px=STAGED_MS))
        return name

    def fetch(self, group_ids: Sequence[int]) -> list[bytes | None]:
        """See PayloadStore."""
        if not group_ids:
            return []
        names = [self._keys.payload(group_id) for group_id in group_ids]
        found: Any = self._connection.attempt(lambda: self._connection.client.mget(names))
        return list(found)
