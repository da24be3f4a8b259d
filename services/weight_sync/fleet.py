"""Engines join and leave on request, while training runs.

Invariant: both may be repeated without harm. `join` answers once the registry holds the engine; it is routable only
after weight-sync has loaded and verified a version. `leave` answers once no worker chooses the engine any more and
nothing runs on it: what had not ended by itself in time was aborted, and its partial answers are back with the workers,
which go on with them elsewhere. An engine that left stays out until it joins again, whatever its supervisor does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from broker.types import EngineRecord, EngineState
from rollout.ports import LEFT
from services.weight_sync.engine_client import Lost
from services.weight_sync.reconciler import Reconciler, has_left

ABORT_S = 10.0  # within which aborted requests come back


class FleetRefusal(Exception):
    """What was asked cannot be done; `reason` is a word for programs, `status` HTTP's."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True)
class Left:
    """How an engine left. drained: its requests ended by themselves. reachable: it answered when it was asked."""

    engine_id: str
    drained: bool
    reachable: bool


async def join(reconciler: Reconciler, engine_id: str, url: str) -> tuple[EngineRecord, bool]:
    """Register an engine; its record, and whether it is new. Raises FleetRefusal."""
    url = checked_url(url)
    known = await find(reconciler, engine_id)
    if known is not None and known.url != url and known.state is not EngineState.GONE:
        raise FleetRefusal(
            409,
            "taken",
            f"{engine_id} is registered under another address. Let that one leave first, or choose a name.",
        )
    if known is not None and known.url == url and not has_left(known):
        return known, False
    answer = await reconciler.client(url).weights()
    if isinstance(answer, Lost):
        raise FleetRefusal(502, "unreachable", f"The engine does not answer at that address: {answer.detail}")
    record = EngineRecord(engine_id, url, EngineState.JOINING)
    await asyncio.to_thread(reconciler.registry.register_engine, record)
    reconciler.wake()
    return record, True


async def leave(reconciler: Reconciler, engine_id: str, drain_s: float) -> Left:
    """Take an engine out; drain_s: how long running requests may go on. Raises FleetRefusal."""
    known = await find(reconciler, engine_id)
    if known is None:
        raise FleetRefusal(404, "unknown", f"No engine {engine_id} is registered.")
    gone = replace(known, state=EngineState.GONE, version=-1, checksum="", detail=LEFT)
    await asyncio.to_thread(reconciler.registry.update_engine, gone, None)
    await reconciler.let_go(engine_id)
    await asyncio.to_thread(reconciler.registry.update_engine, gone, None)  # in case a drive had the last word
    client = reconciler.client(known.url)
    drained = await client.drain(drain_s)
    if isinstance(drained, Lost):
        return Left(engine_id, drained=False, reachable=False)
    if drained.value:
        return Left(engine_id, drained=True, reachable=True)
    aborted = await client.abort()
    ended = await client.drain(ABORT_S)
    if isinstance(aborted, Lost) or isinstance(ended, Lost) or not ended.value:
        raise FleetRefusal(504, "busy", f"{engine_id} takes no new groups, but requests still run on it. Ask again.")
    return Left(engine_id, drained=False, reachable=True)


async def find(reconciler: Reconciler, engine_id: str) -> EngineRecord | None:
    """An engine's record, None if it is not registered."""
    records = await asyncio.to_thread(reconciler.registry.engines)
    return next((record for record in records if record.engine_id == engine_id), None)


def checked_url(url: str) -> str:
    """A base URL without its last slash. Raises FleetRefusal for anything else."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_valid = urlsplit(""), False
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or not port_is_valid:
        raise FleetRefusal(422, "invalid", "url must be like http://host:port, without a path or a password.")
    return url.rstrip("/")
