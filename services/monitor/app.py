"""The monitor over HTTP: JSON under /v1, /metrics for Prometheus, and a live page at /.

Invariant: read-only; every answer comes from one snapshot; if Redis does not answer, so does no endpoint but /healthz.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import jinja2
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from broker.errors import BrokerError
from services.http import NO_EXTERNAL_DOCS, ErrorAnswer, Refusal, harden, requires_token
from services.monitor import views
from services.monitor.diagnosis import diagnose
from services.monitor.metrics import render
from services.monitor.source import Look, Source

HERE = Path(__file__).parent
AWAY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorAnswer, "description": "Redis does not answer."}}
DENIED: dict[int | str, dict[str, Any]] = {401: {"model": ErrorAnswer, "description": "The token is missing or wrong."}}


class State(BaseModel):
    """Whether the process works."""

    status: str = Field(examples=["ok"])


async def look(request: Request) -> Look:
    """The present state, or 503."""
    source: Source = request.app.state.source
    try:
        return await asyncio.to_thread(source.look)
    except BrokerError as error:
        raise Refusal(503, "unavailable", "Redis does not answer, or does not hold this run (yet).") from error


Seen = Annotated[Look, Depends(look)]


def create_app(source: Source, *, read_token: str | None = None, closing: Callable[[], Any] | None = None) -> FastAPI:
    """The application. read_token: needed by everything under /v1 and by /metrics, if given."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        if closing is not None:
            await asyncio.to_thread(closing)

    app = FastAPI(title="Lagrange monitor", version="1", lifespan=lifespan, **NO_EXTERNAL_DOCS)
    harden(app)
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        (HERE / "static" / "page.html").read_text(encoding="utf-8")
    )

    app.state.source = source
    answers = {**AWAY, **DENIED}
    may_read = [requires_token(read_token)]

    @app.get("/healthz")
    async def healthz() -> State:
        """The process answers."""
        return State(status="ok")

    @app.get("/readyz", responses=AWAY)
    async def readyz(_seen: Seen) -> State:
        """Redis answers and holds the run."""
        return State(status="ok")

    @app.get("/v1/run", responses=answers, dependencies=may_read)
    async def run(seen: Seen) -> views.RunAnswer:
        """Where the run is."""
        return views.run(seen.snapshot)

    @app.get("/v1/queue", responses=answers, dependencies=may_read)
    async def queue(seen: Seen) -> views.QueueAnswer:
        """What waits for the trainer, and for how long."""
        return views.queue(seen.snapshot)

    @app.get("/v1/staleness", responses=answers, dependencies=may_read)
    async def staleness(seen: Seen) -> views.StalenessAnswer:
        """Policy lag of what waits and of what was trained, publish lag by engine, and the ledger."""
        return views.staleness(seen.snapshot)

    @app.get("/v1/engines", responses=answers, dependencies=may_read)
    async def engines(seen: Seen) -> views.EnginesAnswer:
        """Engines and rollout workers."""
        return views.engines(seen.snapshot)

    @app.get("/v1/trainer", responses=answers, dependencies=may_read)
    async def trainer(seen: Seen) -> views.TrainerAnswer:
        """The trainer and its last step."""
        return views.trainer(seen.snapshot, seen.records[: views.RECENT_STEPS])

    @app.get("/v1/ledger", responses=answers, dependencies=may_read)
    async def ledger(seen: Seen) -> views.LedgerAnswer:
        """Every issued group and token, and where it went."""
        return views.ledger(seen.snapshot)

    @app.get("/v1/diagnosis", responses=answers, dependencies=may_read)
    async def diagnosis(seen: Seen) -> views.DiagnosisAnswer:
        """What the run suffers from, the figures that say so, and what to change."""
        return views.diagnosis(seen.snapshot, seen.before, seen.records)

    @app.get("/v1/overview", responses=answers, dependencies=may_read)
    async def overview(seen: Seen) -> views.Overview:
        """All of the above from one snapshot, and the last steps: what the page shows."""
        return views.overview(seen.snapshot, seen.before, seen.records)

    @app.get("/metrics", response_class=Response, responses=answers, dependencies=may_read)
    async def metrics(seen: Seen) -> Response:
        """For Prometheus (docs/metrics.md)."""
        verdict = diagnose(seen.snapshot, seen.before, seen.records[: views.RECENT_STEPS])
        return Response(render(seen.snapshot, verdict), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False, dependencies=may_read)
    async def live_page() -> HTMLResponse:
        """The page; it is whole without scripts, and says so if Redis is away."""
        try:
            seen = await asyncio.to_thread(source.look)
        except BrokerError:
            return HTMLResponse(page.render(o=None), 503)
        return HTMLResponse(page.render(o=views.overview(seen.snapshot, seen.before, seen.records)))

    return app
