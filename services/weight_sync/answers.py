"""The bodies of weight-sync's HTTP requests and answers, and how they are filled from the loop's state.

Invariant: what one answer shows of an engine was read in one go, without giving the loop a chance to change it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from broker.types import VersionRecord
from services.http import ErrorAnswer
from services.weight_sync.reconciler import Reconciler


class EngineAnswer(BaseModel):
    """One engine. version: the confirmed one, -1: none; it is routable only in state `serving`."""

    engine_id: str = Field(examples=["engine-0"])
    state: str = Field(examples=["serving"])
    version: int = Field(examples=[42])
    target: int = Field(examples=[42], description="Version of the last load that was begun, -1: none.")
    routable: bool
    behind_published: int | None = Field(
        examples=[0], description="Newest published version less this engine's; null: none."
    )
    checksum: str = Field(description="Over names and checksums of all parameters, as the engine reported them.")
    detail: str = Field(description="Why it is in this state.")
    may_be_paused: bool
    failures_in_a_row: int
    updates: int
    failures: int
    last_load_seconds: float
    last_pause_seconds: float
    last_unroutable_seconds: float


class EnginesAnswer(BaseModel):
    """All registered engines, as this process sees them. leads: false while another process does the work."""

    leads: bool
    leader: str = Field(examples=["sync-0-17-a1b2c3"], description="Process that does the work.")
    published: int | None = Field(examples=[42], description="Newest published version.")
    staged: int | None = Field(examples=[42], description="Newest version that was checked and may be loaded.")
    staging_problem: str
    seconds_since_look: float | None = Field(description="Age of what is shown; null: Redis never answered.")
    engines: list[EngineAnswer]


class VersionAnswer(BaseModel):
    """One published version. published_ms: server time."""

    version: int
    step: int
    checksum: str
    published_ms: int
    engines: list[str] = Field(description="Engines that are confirmed with it.")


class VersionsAnswer(BaseModel):
    """Versions that are still known, oldest first."""

    published: int | None
    versions: list[VersionAnswer]


class SyncRequest(BaseModel):
    """timeout_s: how long to wait for the engines, in seconds."""

    model_config = ConfigDict(extra="forbid")
    timeout_s: float = Field(30.0, gt=0, le=300)


class JoinRequest(BaseModel):
    """An engine that runs elsewhere, under a name that is unique in the run."""

    model_config = ConfigDict(extra="forbid")
    engine_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9@._:-]{0,99}$", examples=["engine-7"])
    url: str = Field(max_length=300, examples=["http://10.0.0.7:30000"])


class JoinAnswer(BaseModel):
    """The engine is registered. It gets requests only once its state is `serving` (GET /v1/engines)."""

    engine_id: str = Field(examples=["engine-7"])
    state: str = Field(examples=["joining"])
    created: bool = Field(description="False if it was registered before; nothing was changed then.")


class LeaveAnswer(BaseModel):
    """The engine gets no more requests and none runs on it."""

    engine_id: str = Field(examples=["engine-7"])
    drained: bool = Field(description="Its requests ended by themselves; false: the rest was aborted.")
    reachable: bool = Field(description="False: it did not answer, so what ran on it is lost to it.")


class SyncAnswer(BaseModel):
    """Every engine was confirmed with `version` (or a newer one) at that moment."""

    version: int
    engines: list[str]


class SyncError(ErrorAnswer):
    """Engines that are not confirmed with the newest version."""

    lagging: list[str]


def engines_answer(reconciler: Reconciler) -> EnginesAnswer:
    """All engines that this process knows."""
    published, staged = reconciler.published, reconciler.staged
    return EnginesAnswer(
        leads=reconciler.lease.leads(),
        leader=reconciler.lease.leader,
        published=published.version if published else None,
        staged=staged.version if staged else None,
        staging_problem=reconciler.staging_problem,
        seconds_since_look=None if reconciler.last_look is None else reconciler.clock() - reconciler.last_look,
        engines=[
            EngineAnswer(
                engine_id=m.shown.engine_id,
                state=m.shown.state,
                version=m.shown.version,
                target=m.life.target,
                routable=m.shown.routable,
                behind_published=published.version - m.shown.version if published and m.shown.version >= 0 else None,
                checksum=m.shown.checksum,
                detail=m.shown.detail,
                may_be_paused=m.life.maybe_paused,
                failures_in_a_row=m.life.failures,
                updates=m.figures.updates,
                failures=m.figures.failures,
                last_load_seconds=m.figures.last_load_seconds,
                last_pause_seconds=m.figures.last_pause_seconds,
                last_unroutable_seconds=m.figures.last_unroutable_seconds,
            )
            for m in reconciler.members.values()
        ],
    )


def versions_answer(reconciler: Reconciler, records: Iterable[VersionRecord]) -> VersionsAnswer:
    """The versions of the registry, with the engines that serve them."""
    serving = [m.shown for m in reconciler.members.values() if m.shown.routable]
    return VersionsAnswer(
        published=reconciler.published.version if reconciler.published else None,
        versions=[
            VersionAnswer(
                version=r.version,
                step=r.step,
                checksum=r.checksum,
                published_ms=r.published_ms,
                engines=[e.engine_id for e in serving if e.version == r.version],
            )
            for r in sorted(records, key=lambda r: r.version)
        ],
    )
