"""The loop of weight-sync: compares what is published with what each engine serves, and closes the gap.

Invariant: everything that this process must know after it was killed is in the registry and in the engines; it keeps no
state of its own on disk. Engines are driven independently: one that hangs delays no other. A published version and an
engine that joins wake the loop at once; a message that is lost costs one interval, nothing else. One process of a run
leads; it holds a lease in Redis and acts on no engine without it. Others stand by and take over when it lapses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx
import structlog

from broker.errors import BrokerError
from broker.logs import bind_version
from broker.types import EngineRecord, EngineState, VersionRecord
from rollout.ports import LEFT
from services.weight_sync import lifecycle as lc
from services.weight_sync.engine_client import EngineClient, Timeouts
from services.weight_sync.lease import Lease
from services.weight_sync.member import Member
from services.weight_sync.ports import Registry
from services.weight_sync.staging import IncompleteVersion, Staged, stage
from services.weight_sync.strategy import Strategy, may_leave
from services.weight_sync.transports import Disk, Transport

log = structlog.get_logger()
REFERENCES_KEPT = 64
IDLE_POLL_S = 0.05
EXPIRED_MS = 10_000  # a supervisor says every second that it lives (rollout/engine.py)
FORGOTTEN_MS = 3_600_000  # then the record of a host that died goes: one that comes back registers afresh


@dataclass(frozen=True, slots=True)
class Settings:
    """How the loop works. interval_s: between looks at the engines. lease_s: time without a look after which another
    process may lead. exact_dtype: see staging.stage. api_key: the engines' key."""

    policy: lc.Policy = field(default_factory=lc.Policy)
    strategy: Strategy = field(default_factory=Strategy)
    timeouts: Timeouts = field(default_factory=Timeouts)
    interval_s: float = 0.5
    lease_s: float = 4.0
    exact_dtype: str | None = None
    api_key: str | None = None


@dataclass
class Totals:
    """Counters since start."""

    looks: int = 0
    registry_failures: int = 0
    unexpected_errors: int = 0
    stagings: int = 0
    staging_failures: int = 0
    staged_bytes: int = 0
    last_staging_seconds: float = 0.0


class Reconciler:
    """Drives all registered engines towards the newest published version.

    transport: makes the way by which weights travel, given what wakes the loop.
    """

    def __init__(
        self,
        registry: Registry,
        http: httpx.AsyncClient,
        settings: Settings,
        transport: Callable[[Callable[[], None]], Transport] = lambda _wake: Disk(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry, self.clock = registry, clock
        self.transport = transport(self.wake)
        self.policy = replace(settings.policy, locked=self.transport.one_call)
        self.members: dict[str, Member] = {}
        self.published: VersionRecord | None = None
        self.staging_problem = ""
        self.totals = Totals()
        self.last_look: float | None = None  # of the last look at the registry that succeeded
        self.last_round: float = clock()
        self._http, self._settings = http, settings
        self._staged: Staged | None = None
        self._staging: asyncio.Task[None] | None = None
        self._staging_not_before = 0.0
        self.lease = Lease(registry, settings.lease_s, clock)
        self._references: dict[int, tuple[str, str]] = {}  # version -> (checksum of its files, of the engine's weights)
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def staged(self) -> Staged | None:
        """The newest version that may be loaded."""
        return self._staged

    def wanted(self, member: Member) -> Staged | None:
        """What a member may be brought to now, ready to be loaded; None: it stays as it is."""
        if self._staged is None:
            return None
        if member.life.state is EngineState.SERVING:
            out = sum(m.is_out for m in self.members.values() if m is not member)
            if not may_leave(self._settings.strategy, out, idle=member.idle):
                return None
        now = self.clock()
        since = now if member.waits_since is None else member.waits_since
        ready = self.transport.ready(member.shown, member.client, self._staged, now - since)
        member.waits_since = None if ready else since
        return self._staged if ready else None

    def reference(self, version: int) -> str | None:
        """Overall checksum that this version was confirmed with, by this process or as the registry shows."""
        if version in self._references:
            return self._references[version][1]
        shown = (m.shown for m in self.members.values())
        return next((r.checksum for r in shown if r.routable and r.version == version and r.checksum), None)

    def confirmed(self, version: int, checksum: str, staged: Staged | None) -> None:
        """Remember a confirmed version's overall checksum, and what was loaded if that is known."""
        self._references[version] = (staged.record.checksum if staged else "", checksum)
        while len(self._references) > REFERENCES_KEPT:
            self._references.pop(min(self._references))

    def other_references(self, staged: Staged | None) -> Mapping[int, str]:
        """Overall checksums of versions whose files differ from those of `staged`; none where that is not known."""
        if staged is None or not staged.record.checksum:
            return {}
        mine = staged.record
        known = self._references.items()
        return {v: own for v, (files, own) in known if v != mine.version and files and files != mine.checksum}

    def wake(self) -> None:
        """Look now rather than at the next interval."""
        self._wake.set()

    def stop(self) -> None:
        """End `run` soon."""
        self._stopped.set()
        self._wake.set()

    def lagging(self) -> list[str]:
        """Engines that are not (yet) confirmed with the newest published version; those that are gone do not count."""
        goal = self.published.version if self.published else -1
        return sorted(
            m.shown.engine_id
            for m in self.members.values()
            if m.shown.state is not EngineState.GONE and not (m.shown.routable and m.shown.version >= goal)
        )

    async def run(self) -> None:
        """Until `stop`: a look every interval. Whatever fails in one look is counted and tried again in the next."""
        loop = asyncio.get_running_loop()
        changes = self.registry.listen(lambda message: _pass_on(message, loop, self._wake))
        try:
            while not self._stopped.is_set():
                self._wake.clear()
                try:
                    await self.look()
                except BrokerError as error:
                    self.totals.registry_failures += 1
                    log.warning("the registry does not answer", problem=str(error))
                except Exception as error:
                    self.totals.unexpected_errors += 1
                    log.error("a look failed", error=type(error).__name__, exc_info=error)
                self.last_round = self.clock()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval()):
                        await self._wake.wait()
        finally:
            await self._cancel_all()
            await self.transport.close()
            await self.lease.give_up()
            changes.close()

    async def look(self) -> None:
        """Read the registry once, stage a new version, and start a drive of every engine that is not being driven."""
        self._collect()
        if not await self._lead():
            return
        # What is read below may be older than what a drive that runs meanwhile writes: such an engine waits its turn.
        driven = {engine_id for engine_id, member in self.members.items() if member.busy}
        records, published, now_ms = await asyncio.to_thread(
            lambda: (self.registry.engines(), self.registry.published(), self.registry.server_time_ms())
        )
        self.totals.looks += 1
        self.last_look, self.published = self.clock(), published
        if published is not None:
            bind_version(published.version)
            self._stage(published)
        records = await self._without_past(records, now_ms)
        self._forget(records)
        for record in records:
            if record.engine_id in driven or has_left(record):
                continue
            if record.down:
                self._rest(record)
            else:
                self._drive(record)
                # An engine that joined over HTTP has no supervisor: its pid is 0, and its lease is the probe alone.
                self.members[record.engine_id].expired = record.pid > 0 and now_ms - record.heartbeat_ms > EXPIRED_MS

    async def _lead(self) -> bool:
        """Whether this process leads; whatever is under way stops when another one does."""
        if await self.lease.renew():
            return True
        self.last_look = self.clock()
        if self.members:
            log.warning("another process leads", leader=self.lease.leader)
            await self._cancel_all()
            self.members.clear()
        return False

    async def _without_past(self, records: Sequence[EngineRecord], now_ms: int) -> tuple[EngineRecord, ...]:
        """The records of engines that may still come to something; the others are removed from the registry."""
        kept = []
        for record in records:
            if is_past(record, now_ms):
                await asyncio.to_thread(self.registry.remove_engine, record.engine_id)
                log.info("engine forgotten", engine=record.engine_id, silent_s=(now_ms - record.heartbeat_ms) // 1000)
            else:
                kept.append(record)
        return tuple(kept)

    def _drive(self, record: EngineRecord) -> None:
        member = self.members.get(record.engine_id)
        if member is None:
            member = self._member(record, lc.takeover(record, self.clock()))
            self.members[record.engine_id] = member
            log.info("engine found", engine=record.engine_id, state=record.state, version=record.version)
        event: lc.Event = lc.Newer() if self._staged and self._staged.version > record.version else lc.Tick()
        if self._is_another_process(member, record):
            figures = member.figures
            member = self._member(record, member.life)
            member.figures = figures
            self.members[record.engine_id] = member
            event = lc.Rejoined()
        member.shown, member.asks_whether_idle = record, self._settings.strategy.name == "on-idle"
        member.task = asyncio.create_task(member.drive(self, event), name=f"drive {record.engine_id}")
        member.task.add_done_callback(self._driven)

    def _rest(self, record: EngineRecord) -> None:
        """Leave an engine alone until its supervisor, which probes a server before it registers it, does so again."""
        life, member = lc.takeover(record, self.clock()), self.members.get(record.engine_id)
        if member is None:
            self.members[record.engine_id] = self._member(record, life)
        else:
            member.shown, member.life = record, life

    def _driven(self, _drive: asyncio.Task[None]) -> None:
        """A drive ended: if an engine may now be brought to a newer version, that need not wait for the interval."""
        for member in self.members.values():
            wanted = self.wanted(member)
            if not member.busy and member.shown.routable and wanted and member.shown.version < wanted.version:
                self._wake.set()

    def _interval(self) -> float:
        """Seconds until the next look; soon while an engine is waited for to be idle."""
        waits = any(m.shown.routable and not m.idle and m.asks_whether_idle for m in self.members.values())
        return min(self._settings.interval_s, IDLE_POLL_S) if waits and self.lagging() else self._settings.interval_s

    @staticmethod
    def _is_another_process(member: Member, record: EngineRecord) -> bool:
        registered_again = record.state is EngineState.JOINING and member.life.state is not EngineState.JOINING
        return registered_again or record.pid != member.shown.pid or record.url != member.shown.url

    def client(self, url: str) -> EngineClient:
        """A client of an engine's control API."""
        return EngineClient(self._http, url, self._settings.timeouts, self._settings.api_key)

    def _member(self, record: EngineRecord, life: lc.Life) -> Member:
        return Member(record, self.client(record.url), life)

    async def let_go(self, engine_id: str) -> None:
        """Stop driving an engine; if it may be paused it is continued."""
        member = self.members.pop(engine_id, None)
        if member is None:
            return
        if member.task is not None:
            member.task.cancel()
            await asyncio.gather(member.task, return_exceptions=True)
        if member.life.maybe_paused:
            await member.client.resume()

    def _forget(self, records: tuple[EngineRecord, ...]) -> None:
        """Drop engines that are no longer registered; one that is being driven is dropped when that has ended."""
        present = {record.engine_id for record in records if not has_left(record)}
        for engine_id in [e for e, m in self.members.items() if e not in present and not m.busy]:
            log.info("engine left", engine=engine_id)
            del self.members[engine_id]

    def _collect(self) -> None:
        """Errors that no drive may have: they are bugs, counted and logged, and the engine is driven again."""
        for member in self.members.values():
            task = member.task
            if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
                self.totals.unexpected_errors += 1
                log.error("a drive failed", engine=member.shown.engine_id, exc_info=task.exception())
                member.task = None

    def _stage(self, published: VersionRecord) -> None:
        running = self._staging is not None and not self._staging.done()
        if running or (self._staged is not None and self._staged.record == published):
            return
        if self.clock() >= self._staging_not_before:
            self._staging = asyncio.create_task(self._stage_now(published), name=f"stage {published.version}")

    async def _stage_now(self, published: VersionRecord) -> None:
        began = self.clock()
        try:
            staged = await asyncio.to_thread(stage, published, self._settings.exact_dtype)
        except Exception as error:  # else what nobody expects of a file would be met again at once, and never told
            known = isinstance(error, IncompleteVersion)
            self.totals.staging_failures += 1
            self.staging_problem = str(error) if known else f"version {published.version}: {type(error).__name__}"
            self._staging_not_before = self.clock() + self.policy.back_off_s
            why, trace = self.staging_problem, None if known else error
            log.error("version cannot be staged", staging=published.version, problem=why, exc_info=trace)
            return
        for member in self.members.values():
            member.idle = False  # what was seen before this version is too old to let it begin: ask again
        self._staged, self.staging_problem = staged, ""
        self.totals.stagings += 1
        self.totals.staged_bytes += staged.bytes
        self.totals.last_staging_seconds = self.clock() - began
        self._wake.set()

    async def _cancel_all(self) -> None:
        tasks = [t for t in [self._staging, *(m.task for m in self.members.values())] if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_past(record: EngineRecord, now_ms: int) -> bool:
    """Whether an engine is gone and its supervisor silent for so long that nothing will come of the record.

    What joined over HTTP has no supervisor (pid 0) and is never past: it may answer again.
    """
    silent_ms = now_ms - record.heartbeat_ms
    return record.state is EngineState.GONE and record.pid != 0 and silent_ms > FORGOTTEN_MS


def has_left(record: EngineRecord) -> bool:
    """Whether somebody told the engine to leave the fleet (services/weight_sync/fleet.py)."""
    return record.state is EngineState.GONE and record.detail == LEFT


def _pass_on(message: str, loop: asyncio.AbstractEventLoop, wake: asyncio.Event) -> None:
    """Wake the loop for what others did; most changes of engines are this process' own."""
    if message.startswith(("version", "staged", "listening", "free")) or f" {EngineState.JOINING.value} " in message:
        loop.call_soon_threadsafe(wake.set)
