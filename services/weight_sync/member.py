"""One engine as weight-sync drives it: carries out the life cycle's commands and shows each state before it acts on it.

Invariant: no Pause, Load or Verify is sent before the registry shows that the engine is out, and under what version it
was last confirmed; so an engine whose weights are being changed is never routable, whatever this process or Redis does
next. Between a pause and its continue nothing is written: what happens there is shown when the engine answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from broker.errors import BrokerError
from broker.types import EngineRecord, EngineState
from services.weight_sync import lifecycle as lc
from services.weight_sync.checksums import Verdict, compare, overall
from services.weight_sync.engine_client import Done, EngineClient, Lost, Served
from services.weight_sync.lease import Lease
from services.weight_sync.ports import Registry
from services.weight_sync.staging import Staged
from services.weight_sync.strategy import is_out
from services.weight_sync.transports import Transport

log = structlog.get_logger()
SHUTDOWN_CONTINUE_S = 3.0
# What the registry shows of an engine that is paused for a load; a process that finds one continues it and loads again.
PAUSED_STATES = (EngineState.PAUSING, EngineState.LOADING)


class Fleet(Protocol):
    """What a member asks of the reconciler."""

    policy: lc.Policy
    registry: Registry
    transport: Transport
    lease: Lease
    clock: Callable[[], float]

    @property
    def staged(self) -> Staged | None:
        """The newest version that may be loaded."""

    def wanted(self, member: Member) -> Staged | None:
        """What a member may be brought to now, ready to be loaded; None: it stays as it is."""

    def reference(self, version: int) -> str | None:
        """Overall checksum that some engine was confirmed with for this version."""

    def confirmed(self, version: int, checksum: str, staged: Staged | None) -> None:
        """Remember a confirmed version's overall checksum, and what was loaded if that is known."""

    def other_references(self, staged: Staged | None) -> Mapping[int, str]:
        """Overall checksums of versions whose files differ from those of `staged`."""


@dataclass
class Figures:
    """Totals since this process started, and last values; seconds."""

    updates: int = 0
    failures: int = 0
    silent_probes: int = 0
    verified_exactly: int = 0
    load_seconds: float = 0.0
    last_load_seconds: float = 0.0
    pause_seconds: float = 0.0
    last_pause_seconds: float = 0.0
    unroutable_seconds: float = 0.0
    last_unroutable_seconds: float = 0.0


@dataclass
class Member:
    """A registered engine. shown: its record as this process last wrote or read it in the registry."""

    shown: EngineRecord
    client: EngineClient
    life: lc.Life
    figures: Figures = field(default_factory=Figures)
    task: asyncio.Task[None] | None = None
    loading: Staged | None = None  # what was ready when the last way to a load began; the newest may be another by now
    waits_since: float | None = None  # since when nothing has been ready that it may be brought to
    held_at: float | None = None  # since when the engine has held requests back, paused or by its lock
    left_at: float | None = None
    expired: bool = False  # its supervisor has not said for long that it lives
    asks_whether_idle: bool = False
    idle: bool = False  # nothing ran on it when it was asked last

    @property
    def busy(self) -> bool:
        """Whether its task runs."""
        return self.task is not None and not self.task.done()

    @property
    def is_out(self) -> bool:
        """Whether an update has it out of the routable ones: until the registry shows again that it serves."""
        return is_out(self.life.state, self.life.version) or is_out(self.shown.state, self.shown.version)

    async def drive(self, fleet: Fleet, first: lc.Event) -> None:
        """From one event (a tick, a rejoin) until there is nothing to do. If cancelled, it is continued."""
        try:
            if self.asks_whether_idle and self.life.state is EngineState.SERVING:
                known, running = fleet.staged, await self.client.running()
                # A version that came meanwhile begins only on a look of its own: the answer may be older than it.
                self.idle = isinstance(running, Done) and running.value == 0 and fleet.staged is known
            event, last = first, None
            while True:
                life, command = self._step(fleet, event, last)
                life, command = await self._show(fleet, life, command)
                if command is None:
                    return
                last, event = command, await self._carry_out(fleet, command)
        except asyncio.CancelledError:
            if self.life.maybe_paused and fleet.lease.alone():  # else whoever leads continues it
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHUTDOWN_CONTINUE_S):
                        await self.client.resume()
            raise

    def _step(self, fleet: Fleet, event: lc.Event, last: lc.Command | None) -> tuple[lc.Life, lc.Command | None]:
        before, ready = self.life, fleet.wanted(self)
        moment = lc.Moment(fleet.policy, fleet.clock(), ready.version if ready else None)
        self.life, command = lc.step(before, event, moment, last)
        if ready is not None and ready.version == self.life.target:
            self.loading = ready
        if self.life.failures > before.failures:
            self.figures.failures += 1
        if self.life.state is not before.state:
            self._changed(fleet, before)
        return self.life, command

    def _changed(self, fleet: Fleet, before: lc.Life) -> None:
        engine, state = self.shown.engine_id, self.life.state
        log.info("engine", engine=engine, was=before.state, now=state, version=self.life.version, why=self.life.detail)
        if before.state is EngineState.SERVING:
            self.left_at = fleet.clock()
        if state is EngineState.SERVING:
            self.figures.updates += 1
            if self.left_at is not None:
                self.figures.last_unroutable_seconds = fleet.clock() - self.left_at
                self.figures.unroutable_seconds += self.figures.last_unroutable_seconds
                self.left_at = None

    async def _show(self, fleet: Fleet, life: lc.Life, command: lc.Command | None) -> tuple[lc.Life, lc.Command | None]:
        """Write the state; if that is impossible, give up whatever would act on the engine's weights."""
        for _ in range(4):
            wanted = replace(
                self.shown, state=life.state, version=life.version, checksum=life.checksum, detail=life.detail
            )
            if not _allowed(fleet, command):
                return life, None  # the next look finds out who leads; a process that takes over starts from the record
            while_paused = life.maybe_paused and isinstance(command, lc.Load | lc.Continue)
            if wanted == self.shown or (while_paused and self.shown.state in PAUSED_STATES):
                return life, command
            try:
                written = await asyncio.to_thread(fleet.registry.update_engine, wanted, self.shown.state)
            except BrokerError as error:
                if command is None or isinstance(command, lc.Probe | lc.Continue):
                    return life, command
                return self._step(fleet, lc.Failed(f"the registry does not answer: {error}"), command)
            if written:
                self.shown = wanted
                return life, command
            # Its supervisor registered it again: what this process knows is about a process that no longer exists.
            self.shown = replace(self.shown, state=EngineState.JOINING, version=-1, checksum="", detail="")
            life, command = self._step(fleet, lc.Rejoined(), None)
        return life, command if isinstance(command, lc.Probe | lc.Continue) else None

    async def _carry_out(self, fleet: Fleet, command: lc.Command) -> lc.Event:
        if isinstance(command, lc.Probe):
            return self._probed(await self.client.probe())
        if isinstance(command, lc.Pause):
            await self.client.quiet(drain=command.drain)
            self.held_at = fleet.clock()
            return _event(await self.client.pause())
        if isinstance(command, lc.Continue):
            return self._released(fleet, await self.client.resume())
        if isinstance(command, lc.Load):
            return await self._load(fleet, command)
        return await self._verify(fleet, command.version)

    def _probed(self, outcome: Done[Served] | Lost) -> lc.Event:
        if isinstance(outcome, Lost):
            self.figures.silent_probes += 1
            return lc.Silent(outcome.refused, self.expired)
        return lc.Answered(outcome.value.weights, outcome.value.paused)

    def _released(self, fleet: Fleet, outcome: Done[None] | Lost) -> lc.Event:
        """A continue was answered, or a load without a pause."""
        if isinstance(outcome, Done) and self.held_at is not None:
            self.figures.last_pause_seconds = fleet.clock() - self.held_at
            self.figures.pause_seconds += self.figures.last_pause_seconds
            self.held_at = None
        return _event(outcome)

    async def _load(self, fleet: Fleet, command: lc.Load) -> lc.Event:
        staged, began = self.loading, fleet.clock()
        if staged is None or staged.version != command.version:
            return lc.Failed(f"version {command.version} is not staged")
        name = unverified(staged.version)
        outcome = await fleet.transport.load(self.shown, self.client, staged, name, drain=command.drain)
        if isinstance(outcome, Lost) and not outcome.refused:
            await self.client.rename(name)  # half of a load keeps the old name, and requests that it held back run now
        self.figures.last_load_seconds = fleet.clock() - began
        self.figures.load_seconds += self.figures.last_load_seconds
        if self.life.maybe_paused:
            return _event(outcome)
        self.held_at = began
        return self._released(fleet, outcome)

    async def _verify(self, fleet: Fleet, version: int) -> lc.Event:
        weights, sums = await asyncio.gather(self.client.weights(), self.client.checksums())
        if isinstance(weights, Lost):
            return lc.Failed(weights.detail)
        if weights.value not in (unverified(version), str(version)):
            return lc.Failed(f"names its weights {weights.value[:80]!r} after a load of {version}")
        if isinstance(sums, Lost):
            return lc.Failed(sums.detail)
        verdict = self._compare(fleet, version, sums.value)
        if isinstance(verdict, lc.Failed) or weights.value == str(version):
            return verdict
        named = await self.client.rename(str(version))
        return lc.Failed(named.detail) if isinstance(named, Lost) else verdict

    def _compare(self, fleet: Fleet, version: int, sums: Mapping[str, str]) -> lc.Event:
        total = overall(sums)
        staged = next((s for s in (self.loading, fleet.staged) if s is not None and s.version == version), None)
        if staged is not None and staged.checksums:
            verdict, difference = compare(sums, staged.checksums)
            if verdict is Verdict.DIFFERENT:
                return lc.Failed(f"the weights are not those of version {version}: {difference}")
            if verdict is Verdict.EXACT:
                self.figures.verified_exactly += 1
                fleet.confirmed(version, total, staged)
                return lc.Succeeded(total)
        known = fleet.reference(version) or (self.life.checksum if self.life.version == version else None)
        if known and known != total:
            return lc.Failed(f"the weights differ from those that version {version} was confirmed with before")
        same = sorted(other for other, checksum in fleet.other_references(staged).items() if checksum == total)
        if same:
            return lc.Failed(f"the weights are still those of version {same[0]}")
        fleet.confirmed(version, total, staged)
        return lc.Succeeded(total)


def _allowed(fleet: Fleet, command: lc.Command | None) -> bool:
    """Whether a command may be carried out: all by the leader; a continue also when nobody else is known to lead."""
    if command is None or isinstance(command, lc.Probe) or fleet.lease.leads():
        return True
    return isinstance(command, lc.Continue) and fleet.lease.alone()


def unverified(version: int) -> str:
    """What an engine calls the weights of a version until they were read back. No integer: no sample of it counts."""
    return f"unverified-{version}"


def _event(outcome: Done[None] | Lost) -> lc.Event:
    return lc.Failed(outcome.detail) if isinstance(outcome, Lost) else lc.Succeeded()
