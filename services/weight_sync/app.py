"""Weight-sync over HTTP: what each engine serves, which versions there are, and "now".

Invariant: 200 for POST /v1/sync means that at that moment every engine that is not gone was confirmed with the newest
published version; in every other case the answer is above 299 and says which engines are not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from broker.errors import BrokerError
from services.http import NO_EXTERNAL_DOCS, ErrorAnswer, Problem, Refusal, harden, requires_token
from services.weight_sync.metrics import render
from services.weight_sync.reconciler import Reconciler

STALE_S = 15.0
ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "The bearer token is missing or wrong."},
    403: {"model": ErrorAnswer, "description": "Another site's page asked for it."},
    409: {"model": ErrorAnswer, "description": "There is nothing to load: no version is published."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    422: {"model": ErrorAnswer, "description": "The body is not what is expected."},
    503: {"model": ErrorAnswer, "description": "Redis does not answer."},
}


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
    """All registered engines, as this process sees them."""

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


class SyncAnswer(BaseModel):
    """Every engine was confirmed with `version` (or a newer one) at that moment."""

    version: int
    engines: list[str]


class SyncError(ErrorAnswer):
    """Engines that are not confirmed with the newest version."""

    lagging: list[str]


class State(BaseModel):
    """Whether the process works."""

    status: str = Field(examples=["ok"])


def create_app(
    reconciler: Reconciler,
    token: str | None,
    closing: Callable[[], Any] | None = None,
    http: httpx.AsyncClient | None = None,
) -> FastAPI:
    """The application; it runs the reconciler while it is up. closing: called when everything has stopped."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.create_task(reconciler.run(), name="reconciler")
        try:
            yield
        finally:
            reconciler.stop()
            await asyncio.gather(loop, return_exceptions=True)
            if http is not None:
                await http.aclose()
            if closing is not None:
                await asyncio.to_thread(closing)

    app = FastAPI(title="Lagrange weight-sync", version="1", lifespan=lifespan, **NO_EXTERNAL_DOCS)
    harden(app)

    @app.get("/healthz", responses={503: {"model": ErrorAnswer}})
    async def healthz() -> State:
        """The loop runs."""
        if reconciler.clock() - reconciler.last_round > 4 * STALE_S:
            raise Refusal(503, "stuck", "The loop has not come round for a minute.")
        return State(status="ok")

    @app.get("/readyz", responses={503: {"model": ErrorAnswer}})
    async def readyz() -> State:
        """The loop runs and Redis answered lately."""
        _fresh(reconciler)
        return State(status="ok")

    @app.get("/v1/engines")
    async def engines() -> EnginesAnswer:
        """Every registered engine, its state and its confirmed version."""
        return _engines(reconciler)

    @app.get("/v1/versions", responses={503: {"model": ErrorAnswer}})
    async def versions() -> VersionsAnswer:
        """The versions that are still known, and who serves them."""
        try:
            records = await asyncio.to_thread(reconciler.registry.versions)
        except BrokerError as error:
            raise Refusal(503, "unavailable", "Redis does not answer.") from error
        return VersionsAnswer(
            published=reconciler.published.version if reconciler.published else None,
            versions=[
                VersionAnswer(
                    version=r.version,
                    step=r.step,
                    checksum=r.checksum,
                    published_ms=r.published_ms,
                    engines=[
                        m.shown.engine_id
                        for m in reconciler.members.values()
                        if m.shown.routable and m.shown.version == r.version
                    ],
                )
                for r in sorted(records, key=lambda r: r.version)
            ],
        )

    @app.post(
        "/v1/sync",
        response_model=SyncAnswer,
        responses={**ERRORS, 504: {"model": SyncError, "description": "Some engines are not there (yet)."}},
        dependencies=[requires_token(token)],
    )
    async def sync(request: SyncRequest | None = None) -> Any:
        """Look now, and answer when every engine serves the newest version. Repeating it is harmless."""
        return await _sync(reconciler, (request or SyncRequest(timeout_s=30.0)).timeout_s)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus (docs/metrics.md)."""
        return Response(render(reconciler), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _fresh(reconciler: Reconciler) -> None:
    if reconciler.last_look is None or reconciler.clock() - reconciler.last_look > STALE_S:
        raise Refusal(503, "unavailable", "Redis does not answer.")


def _engines(reconciler: Reconciler) -> EnginesAnswer:
    published, staged = reconciler.published, reconciler.staged
    return EnginesAnswer(
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


async def _sync(reconciler: Reconciler, timeout_s: float) -> Any:
    end, asked = reconciler.clock() + timeout_s, reconciler.clock()
    while True:
        reconciler.wake()
        await asyncio.sleep(0.02)
        looked = reconciler.last_look is not None and reconciler.last_look > asked
        if looked and reconciler.published is None:
            raise Refusal(409, "nothing-published", "No version is published yet; the trainer publishes the first one.")
        lagging = reconciler.lagging()
        if looked and reconciler.published is not None and not lagging:
            there = [m.shown.engine_id for m in reconciler.members.values() if m.shown.routable]
            if not there:
                raise Refusal(409, "no-engine", "No engine is registered that could load the version.")
            return SyncAnswer(version=reconciler.published.version, engines=sorted(there))
        if reconciler.clock() >= end:
            _fresh(reconciler)
            message = f"{len(lagging)} engines are not confirmed with the newest version; GET /v1/engines says why."
            problem = Problem(reason="lagging", message=message)
            return JSONResponse(SyncError(error=problem, lagging=lagging).model_dump(), 504)
