"""What every part of the broker needs: the run's keys, its transitions, its payload store, one error for each refusal.

Invariant: nothing is decided here; a handle holds no state of the run but where its payloads lie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from broker import wire
from broker.connection import Connection
from broker.errors import BrokerError, CorruptPayload, NotInitialised, SchemaMismatch
from broker.keys import Keys
from broker.store import PayloadStore, RedisPayloadStore, store_of_run
from broker.types import Group


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """A record that does not read as one is an error of the broker: whoever wrote it, nobody else ends by it."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
        raise SchemaMismatch(
            f"Redis holds a record that this release cannot read ({type(error).__name__}: {error}). Run all processes "
            "from one release."
        ) from error


class RunHandle:
    """A connection and the names of one run; the parts of `Broker` build on it."""

    def __init__(self, connection: Connection, run_id: str, store: PayloadStore | None = None) -> None:
        self.run_id = run_id
        self._connection = connection
        self._keys = Keys(run_id)
        self._chosen = store
        self._codec: wire.Codec = "raw"

    def fetch(self, group_ids: Sequence[int]) -> list[Group]:
        """Payloads of accepted groups, arrays read-only. Raises CorruptPayload for the first that cannot be read.

        Any process of the run may fetch: each data-parallel rank its own share of the batch that rank 0 pulled.
        """
        return self._decoded(group_ids, self.fetch_bytes(group_ids))

    def fetch_bytes(self, group_ids: Sequence[int]) -> list[bytes | memoryview]:
        """The same as they are stored (broker/wire.py)."""
        if not group_ids:
            return []
        found = self._store().found(self._connection.commands([self._store().asks(group_ids)])[0])
        for group_id, data in zip(group_ids, found, strict=True):
            if data is None:
                raise CorruptPayload(group_id, "missing")
        return [data for data in found if data is not None]

    def collect_payloads(self, *, sweep: bool = False) -> int:
        """Delete files of closed groups from a payload folder, with `sweep` also those that crashes left; how many."""
        store = self._store()
        return store.collect() + (store.sweep() if sweep else 0)

    def _decoded(self, group_ids: Sequence[int], payloads: Sequence[bytes | memoryview]) -> list[Group]:
        return [wire.decode(data, self.run_id, i) for i, data in zip(group_ids, payloads, strict=True)]

    def _call(self, name: str, *arguments: str | int | float | bytes) -> list[Any]:
        return self._initialised(self._connection.call(name, [self._keys.prefix], arguments))

    def _initialised(self, answer: list[Any]) -> list[Any]:
        if answer and answer[0] == "uninitialised":
            raise NotInitialised(
                f"run {self.run_id!r} is not in Redis at {self._connection.url}. If the server lost its data, restart "
                "the trainer from its checkpoint; else check run.id."
            )
        return answer

    def _tidy(self, *, sweep: bool = False) -> None:
        """Housekeeping after a transition that is done: an error here is not the transition's; the next one tries."""
        with contextlib.suppress(BrokerError, OSError):
            self.collect_payloads(sweep=sweep)

    def _store(self) -> PayloadStore:
        """The place that the run's policy names: all processes of a run agree without being told."""
        if self._chosen is None:
            store, codec = store_of_run(self._connection, self._keys)
            if store is None:
                return RedisPayloadStore(self._connection, self._keys)  # not initialised, as the transition will say
            self._chosen, self._codec = store, codec
        return self._chosen

    def _hash(self, name: str, command: Literal["hgetall", "hdel"], *fields: str) -> object:
        action = getattr(self._connection.client, command)
        return self._connection.attempt(lambda: action(self._keys.named(name), *fields))

    def _newest(self, name: str, limit: int) -> list[bytes]:
        client = self._connection.client
        found: Any = self._connection.attempt(lambda: client.lrange(self._keys.named(name), 0, limit - 1))
        return list(found)
