"""Engines that the configuration names: `engine.urls`, looked up again and again.

Invariant: a name stands for all addresses that it resolves to, each an engine of its own, as a headless Service of
Kubernetes has it. One that appears is asked to join as if by POST /v1/engines; one whose address left the name gets
nothing new, while what runs on it may end. A lookup that fails changes nothing, an engine that a supervisor registered
under the same address is the supervisor's, and one that was told to leave stays out. `plan` is pure.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog

from broker.errors import BrokerError
from broker.types import EngineRecord
from services.weight_sync import fleet
from services.weight_sync.reconciler import Reconciler

log = structlog.get_logger()
LOOK_EVERY_S = 5.0
LOOKUP_TIMEOUT_S = 10.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to change. join: base URL by engine id. forget: ids of records to remove."""

    join: Mapping[str, str]
    forget: tuple[str, ...]


def engines_at(url: str, addresses: Sequence[str]) -> dict[str, str]:
    """Base URL by engine id: one for each address, or one under the name itself if there are none to tell apart."""
    parts = urlsplit(url)
    if not expands(url):
        return {parts.netloc: url}
    port = parts.port or 80
    return {
        f"{parts.hostname}@{address}:{port}": f"http://{f'[{address}]' if ':' in address else address}:{port}"
        for address in addresses
    }


def expands(url: str) -> bool:
    """Whether the host may stand for several engines: not an address, nor under https, whose certificate names it."""
    parts = urlsplit(url)
    try:
        ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return parts.scheme == "http"
    return False


def plan(found: Mapping[str, Mapping[str, str]], records: Iterable[EngineRecord]) -> Plan:
    """What to do about the engines that were found.

    found: by URL of the configuration, what `engines_at` says; only those whose lookup succeeded.
    """
    known = list(records)
    supervised = {record.url for record in known if record.pid != 0}
    present = {record.engine_id for record in known}
    wanted = {engine_id: url for engines in found.values() for engine_id, url in engines.items()}
    names = tuple(f"{urlsplit(url).hostname}@" for url in found if expands(url))
    mine = [record for record in known if record.pid == 0 and names and record.engine_id.startswith(names)]
    return Plan(
        join={i: url for i, url in wanted.items() if i not in present and url not in supervised},
        forget=tuple(r.engine_id for r in mine if r.engine_id not in wanted or r.url in supervised),
    )


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """Addresses of a host, of one family, so that a server that listens on both is one. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = found[0][0]
    return sorted({str(address[0]) for kind, _, _, _, address in found if kind == family})


class Discovery:
    """Keeps the registry in step with what the configuration's URLs resolve to."""

    def __init__(
        self,
        reconciler: Reconciler,
        urls: Sequence[str],
        resolve: Resolve = addresses_of,
        interval_s: float = LOOK_EVERY_S,
    ) -> None:
        self._reconciler, self._urls, self._resolve, self._interval_s = reconciler, urls, resolve, interval_s
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while self._urls:
            if self._reconciler.lease.leads():
                try:
                    await self.look()
                except BrokerError as error:
                    log.warning("engines cannot be looked up", problem=str(error))
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Look all names up once. Raises BrokerError."""
        found = {url: engines for url in self._urls if (engines := await self._find(url)) is not None}
        records = await asyncio.to_thread(self._reconciler.registry.engines)
        todo = plan(found, records)
        for engine_id in todo.forget:
            await self._reconciler.let_go(engine_id)
            await asyncio.to_thread(self._reconciler.registry.remove_engine, engine_id)
            log.info("engine no longer found", engine=engine_id)
        for engine_id, url in todo.join.items():
            try:
                await fleet.join(self._reconciler, engine_id, url)
                self._note(url, "")
                log.info("engine found by its address", engine=engine_id, url=url)
            except fleet.FleetRefusal as refusal:
                self._note(url, str(refusal))

    async def _find(self, url: str) -> Mapping[str, str] | None:
        """Engines at a URL of the configuration; None: the lookup failed."""
        if not expands(url):
            return engines_at(url, ())
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                addresses = await self._resolve(parts.hostname or "", parts.port or 80)
        except OSError as error:  # TimeoutError is one
            self._note(url, f"its name cannot be looked up: {error or type(error).__name__}")
            return None
        return engines_at(url, addresses)

    def _note(self, url: str, problem: str) -> None:
        """Log a problem when it begins or changes, not at each look."""
        if problem and self._problems.get(url) != problem:
            log.warning("engine of the configuration is not there", url=url, problem=problem)
        self._problems[url] = problem
