"""The monitor's read endpoints.

Invariant: every answer comes from one snapshot; if Redis does not answer, neither do they (503).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from broker.errors import BrokerError
from services.http import ErrorAnswer, Refusal
from services.monitor import detail, views
from services.monitor import samples as readable
from services.monitor.diagnosis import diagnose
from services.monitor.metrics import render
from services.monitor.source import Look, Source

AWAY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorAnswer, "description": "Redis does not answer."}}
BAD: dict[int | str, dict[str, Any]] = {422: {"model": ErrorAnswer, "description": "A parameter is out of range."}}
Limit = Annotated[int, Query(ge=1, le=detail.SHOWN)]
FewSamples = Annotated[int, Query(ge=1, le=readable.SHOWN)]
DENIED: dict[int | str, dict[str, Any]] = {401: {"model": ErrorAnswer, "description": "The token is missing or wrong."}}


async def look(request: Request, *, full: bool = False) -> Look:
    """The present state, or 503."""
    source: Source = request.app.state.source
    try:
        return await asyncio.to_thread(source.look, full)
    except BrokerError as error:
        raise Refusal(503, "unavailable", "Redis does not answer, or does not hold this run (yet).") from error


async def light_look(request: Request) -> Look:
    """A look without what only few answers need."""
    return await look(request)


async def full_look(request: Request) -> Look:
    """A look with all events and dead letters, and who caused which lag and which wait."""
    return await look(request, full=True)


Seen = Annotated[Look, Depends(light_look)]
SeenInFull = Annotated[Look, Depends(full_look)]


def overview_of(seen: Look) -> views.Overview:
    """All that the page shows."""
    return views.overview(seen.snapshot, seen.before, seen.records)


def as_json(answer: BaseModel) -> Response:
    """A large answer, valid as it was made: the framework would check each of its parts again, which takes longer."""
    return Response(answer.model_dump_json(), media_type="application/json")


def reads(may_read: Sequence[Any]) -> APIRouter:
    """The endpoints. may_read: dependencies of each."""
    made = APIRouter(responses={**AWAY, **DENIED}, dependencies=may_read)
    made.include_router(_figures())
    made.include_router(_records())

    @made.get("/metrics", response_class=Response)
    async def metrics(seen: SeenInFull) -> Response:
        """For Prometheus (docs/metrics.md)."""
        verdict = diagnose(seen.snapshot, seen.before, seen.records)
        return Response(render(seen.snapshot, verdict), media_type="text/plain; version=0.0.4; charset=utf-8")

    return made


def _figures() -> APIRouter:
    """How the run stands."""
    made = APIRouter()

    @made.get("/v1/run")
    async def run(seen: Seen) -> views.RunAnswer:
        """Where the run is."""
        return views.run(seen.snapshot)

    @made.get("/v1/queue")
    async def queue(seen: Seen) -> views.QueueAnswer:
        """What waits for the trainer, and for how long."""
        return views.queue(seen.snapshot)

    @made.get("/v1/staleness", response_model=views.StalenessAnswer)
    async def staleness(seen: SeenInFull) -> Response:
        """Policy lag of what waits and of what was trained, publish lag by engine, and the ledger."""
        return as_json(views.staleness(seen.snapshot))

    @made.get("/v1/engines")
    async def engines(seen: Seen) -> views.EnginesAnswer:
        """Engines and rollout workers."""
        return views.engines(seen.snapshot)

    @made.get("/v1/trainer")
    async def trainer(seen: Seen) -> views.TrainerAnswer:
        """The trainer and its last step."""
        return views.trainer(seen.snapshot, seen.records)

    @made.get("/v1/ledger")
    async def ledger(seen: Seen) -> views.LedgerAnswer:
        """Every issued group and token, and where it went."""
        return views.ledger(seen.snapshot)

    @made.get("/v1/diagnosis")
    async def diagnosis(seen: Seen) -> views.DiagnosisAnswer:
        """What the run suffers from, the figures that say so, and what to change."""
        return views.diagnosis(seen.snapshot, seen.before, seen.records)

    @made.get("/v1/overview", response_model=views.Overview)
    async def overview(seen: Seen) -> Response:
        """All of the above from one snapshot, and the last steps: what the page shows."""
        return as_json(overview_of(seen))

    return made


def _records() -> APIRouter:
    """What happened in it, and who takes part: lists, of which `limit` gives the newest."""
    made = APIRouter()

    @made.get("/v1/events", responses=BAD)
    async def events(seen: SeenInFull, limit: Limit = 100) -> detail.EventsAnswer:
        """The newest events: attachments, versions, engines, dead letters, steering."""
        return detail.events(seen.snapshot, limit)

    @made.get("/v1/evaluations", responses=BAD)
    async def evaluations(seen: SeenInFull, limit: Limit = 100) -> detail.EvaluationsAnswer:
        """Scores of published versions, newest first: with intervals, version, step and evaluation lag."""
        return detail.evaluations(seen.snapshot, limit)

    @made.get("/v1/samples", responses=BAD)
    async def samples(request: Request, seen: Seen, limit: FewSamples = 8) -> readable.SamplesAnswer:
        """Some trajectories of the newest versions as text, by version; none if this host has not the run's folder."""
        return await asyncio.to_thread(readable.samples, seen.snapshot, request.app.state.folder, limit)

    @made.get("/v1/dead-letters", responses=BAD)
    async def dead_letters(seen: SeenInFull, limit: Limit = 100) -> detail.DeadLettersAnswer:
        """Prompts that were given up, newest first."""
        return detail.dead_letters(seen.snapshot, limit)

    @made.get("/v1/workers")
    async def workers(seen: Seen) -> detail.WorkersAnswer:
        """Rollout workers, whether they live, and what they say of themselves."""
        return detail.workers(seen.snapshot)

    @made.get("/v1/versions")
    async def versions(seen: Seen) -> detail.VersionsAnswer:
        """The versions that are still there, and who serves them."""
        return detail.versions(seen.snapshot)

    return made
