"""Weight-sync over HTTP: what each engine serves, which versions there are, and "now".

Invariant: 200 for POST /v1/sync means that at that moment every engine that is not gone was confirmed with the newest
published version; in every other case the answer is above 299 and says which engines are not. The process does not
outlive its loop: without it, it would answer and do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Annotated, Any

import httpx
import structlog
from fastapi import APIRouter, FastAPI, Query, Response
from fastapi.responses import JSONResponse

from broker.errors import BrokerError
from services.http import NO_EXTERNAL_DOCS, REFUSALS, ErrorAnswer, Problem, Refusal, State, harden, requires_token
from services.weight_sync import fleet
from services.weight_sync.answers import (
    EnginesAnswer,
    JoinAnswer,
    JoinRequest,
    LeaveAnswer,
    SyncAnswer,
    SyncError,
    SyncRequest,
    VersionsAnswer,
    engines_answer,
    versions_answer,
)
from services.weight_sync.metrics import render
from services.weight_sync.reconciler import Reconciler

log = structlog.get_logger(__name__)
STALE_S = 15.0
ERRORS: dict[int | str, dict[str, Any]] = {
    **REFUSALS,
    409: {"model": ErrorAnswer, "description": "There is nothing to load: no version is published."},
    503: {"model": ErrorAnswer, "description": "Redis does not answer, or another process leads."},
}


def create_app(
    reconciler: Reconciler,
    token: str | None,
    closing: Callable[[], Any] | None = None,
    http: httpx.AsyncClient | None = None,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> FastAPI:
    """The application; it runs the reconciler while it is up.

    closing: called when everything has stopped. beside: what goes on as long as it is up, cancelled at the end.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.create_task(reconciler.run(), name="reconciler")
        other = [asyncio.create_task(beside(), name="beside")] if beside is not None else []
        for task in (loop, *other):
            task.add_done_callback(_end_with)
        try:
            yield
        finally:
            for task in other:
                task.cancel()
            reconciler.stop()
            await asyncio.gather(loop, *other, return_exceptions=True)
            if http is not None:
                await http.aclose()
            if closing is not None:
                await asyncio.to_thread(closing)

    app = FastAPI(title="Lagrange weight-sync", version="1", lifespan=lifespan, **NO_EXTERNAL_DOCS)
    harden(app)
    app.include_router(_reads(reconciler))
    app.include_router(_commands(reconciler, token))
    return app


def _end_with(task: asyncio.Task[None]) -> None:
    """End the process in order if a task of it failed; who started it starts it again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("weight-sync ends and can be started again", task=task.get_name(), exc_info=error)
        signal.raise_signal(signal.SIGTERM)


def _reads(reconciler: Reconciler) -> APIRouter:
    """What each engine serves, and whether this process is well."""
    made = APIRouter()

    @made.get("/healthz", responses={503: {"model": ErrorAnswer}})
    async def healthz() -> State:
        """The loop runs."""
        if reconciler.clock() - reconciler.last_round > 4 * STALE_S:
            raise Refusal(503, "stuck", "The loop has not come round for a minute.")
        return State()

    @made.get("/readyz", responses={503: {"model": ErrorAnswer}})
    async def readyz() -> State:
        """The loop runs and Redis answered lately."""
        _fresh(reconciler)
        return State()

    @made.get("/v1/engines")
    async def engines() -> EnginesAnswer:
        """Every registered engine, its state and its confirmed version."""
        return engines_answer(reconciler)

    @made.get("/v1/versions", responses={503: {"model": ErrorAnswer}})
    async def versions() -> VersionsAnswer:
        """The versions that are still known, and who serves them."""
        try:
            records = await asyncio.to_thread(reconciler.registry.versions)
        except BrokerError as error:
            raise Refusal(503, "unavailable", "Redis does not answer.") from error
        return versions_answer(reconciler, records)

    @made.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus (docs/metrics.md)."""
        return Response(render(reconciler), media_type="text/plain; version=0.0.4; charset=utf-8")

    return made


def _commands(reconciler: Reconciler, token: str | None) -> APIRouter:
    """Engines join and leave, and are brought to the newest version now."""
    made = APIRouter(dependencies=[requires_token(token)])

    @made.post(
        "/v1/engines",
        status_code=201,
        responses={
            **ERRORS,
            200: {"model": JoinAnswer, "description": "It was registered before."},
            409: {"model": ErrorAnswer, "description": "Another engine has this name."},
            502: {"model": ErrorAnswer, "description": "The engine does not answer."},
        },
    )
    async def join(request: JoinRequest, response: Response) -> JoinAnswer:
        """Let an engine join the run. Repeating it is harmless."""
        _standby(reconciler)
        with _refusals():
            record, created = await fleet.join(reconciler, request.engine_id, request.url)
        response.status_code = 201 if created else 200
        return JoinAnswer(engine_id=record.engine_id, state=record.state, created=created)

    @made.delete(
        "/v1/engines/{engine_id}",
        responses={
            **ERRORS,
            404: {"model": ErrorAnswer, "description": "No such engine is registered."},
            504: {"model": ErrorAnswer, "description": "It gets no more requests, but some still run."},
        },
    )
    async def leave(engine_id: str, drain_s: Annotated[float, Query(ge=0, le=600)] = 30.0) -> LeaveAnswer:
        """Take an engine out: no new requests; those that still run after `drain_s` seconds go on elsewhere.

        Repeating it is harmless.
        """
        _standby(reconciler)
        with _refusals():
            left = await fleet.leave(reconciler, engine_id, drain_s)
        return LeaveAnswer(engine_id=left.engine_id, drained=left.drained, reachable=left.reachable)

    @made.post(
        "/v1/sync",
        response_model=SyncAnswer,
        responses={**ERRORS, 504: {"model": SyncError, "description": "Some engines are not there (yet)."}},
    )
    async def sync(request: SyncRequest | None = None) -> Any:
        """Look now, and answer when every engine serves the newest version. Repeating it is harmless."""
        return await _sync(reconciler, (request or SyncRequest(timeout_s=30.0)).timeout_s)

    return made


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except fleet.FleetRefusal as error:
        raise Refusal(error.status, error.reason, str(error)) from error
    except BrokerError as error:
        raise Refusal(503, "unavailable", "Redis does not answer.") from error


def _fresh(reconciler: Reconciler) -> None:
    if reconciler.last_look is None or reconciler.clock() - reconciler.last_look > STALE_S:
        raise Refusal(503, "unavailable", "Redis does not answer.")


def _standby(reconciler: Reconciler) -> None:
    if not reconciler.lease.alone():
        raise Refusal(503, "standby", f"This process stands by; {reconciler.lease.leader} leads. Ask that one.")


async def _sync(reconciler: Reconciler, timeout_s: float) -> Any:
    end, asked = reconciler.clock() + timeout_s, reconciler.clock()
    while True:
        reconciler.wake()
        await asyncio.sleep(0.02)
        _standby(reconciler)
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
