"""The monitor over HTTP: JSON under /v1, /metrics for Prometheus, a live page at /, and steering.

Invariant: nothing but steering and the adaptive lag writes; every answer comes from one snapshot; if Redis does not
answer, no endpoint but /healthz and the stream does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from broker.errors import BrokerError
from configs.schema import AdaptiveLagSection
from services.http import NO_EXTERNAL_DOCS, ErrorAnswer, Refusal, State, harden, requires_token
from services.monitor.adaptive import keep
from services.monitor.feed import Feed, message
from services.monitor.reads import AWAY, DENIED, Seen, overview_of, reads
from services.monitor.source import Source
from services.monitor.steering import Steerable, router
from services.monitor.tiles import LABELS
from services.monitor.views import lag_rows

HERE = Path(__file__).parent


def create_app(
    source: Source,
    *,
    steer: Steerable | None = None,
    token: str | None = None,
    read_token: str | None = None,
    open_to_all: bool = False,
    adaptive: AdaptiveLagSection | None = None,
    folder: Path | None = None,
    closing: Callable[[], Any] | None = None,
) -> FastAPI:
    """The application. read_token: needed by everything under /v1 and by /metrics, if given.

    steer: what carries out commands; None: there are none. token: needed by every command; None: each is refused,
    unless open_to_all says that something in front decides. adaptive: settings of the adaptive lag, None: off.
    folder: the run's, for its samples.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        controller = None
        if adaptive is not None and steer is not None:
            controller = asyncio.create_task(keep(adaptive, source.look, steer), name="adaptive lag")
        yield
        if controller is not None:
            controller.cancel()
            await asyncio.gather(controller, return_exceptions=True)
        if closing is not None:
            await asyncio.to_thread(closing)

    app = FastAPI(title="Lagrange monitor", version="1", lifespan=lifespan, **NO_EXTERNAL_DOCS)
    harden(app)
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    app.state.source = source
    app.state.folder = folder
    app.state.leaving = False
    if steer is not None:
        app.include_router(router(steer, token, open_to_all=open_to_all))

    @app.get("/healthz")
    async def healthz() -> State:
        """The process answers."""
        return State()

    @app.get("/readyz", responses=AWAY)
    async def readyz(_seen: Seen) -> State:
        """Redis answers and holds the run."""
        return State()

    may_read = [requires_token(read_token)]
    app.include_router(reads(may_read))
    app.include_router(_stream(source, lambda: bool(app.state.leaving), may_read))
    app.include_router(_page(source, may_read))
    return app


def _stream(source: Source, leaving: Callable[[], bool], may_read: Sequence[Any]) -> APIRouter:
    """What happens, as it happens. leaving: whether streams are to end."""
    made = APIRouter(dependencies=may_read)

    async def newest() -> bytes:
        try:
            seen = await asyncio.to_thread(source.look)
        except BrokerError:
            return message("away", "{}")
        shown = await asyncio.to_thread(lambda: overview_of(seen).model_dump_json())
        return message("overview", shown, seen.snapshot.time_ms)

    feed = Feed(newest, leaving)
    streams: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        429: {"model": ErrorAnswer, "description": "Too many clients follow."},
        **DENIED,
    }

    @made.get("/v1/stream", response_class=StreamingResponse, responses=streams)
    async def stream() -> StreamingResponse:
        """Server-sent events: `overview` once a second, as GET /v1/overview; `away` while Redis does not answer."""
        if feed.full:
            raise Refusal(429, "busy", "Too many clients follow; poll /v1/overview.")
        return StreamingResponse(feed.follow(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    return made


def _page(source: Source, may_read: Sequence[Any]) -> APIRouter:
    """The live page."""
    made = APIRouter(dependencies=may_read)
    templates = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    templates.filters["clock"] = lambda ms: datetime.fromtimestamp(ms / 1000, UTC).strftime("%H:%M:%S")
    page = templates.from_string((HERE / "static" / "page.html").read_text(encoding="utf-8"))

    @made.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def live_page() -> HTMLResponse:
        """The page; it is whole without scripts, and says so if Redis is away."""
        try:
            seen = await asyncio.to_thread(source.look)
        except BrokerError:
            return HTMLResponse(page.render(o=None, labels=LABELS), 503)
        shown = overview_of(seen)
        rows = lag_rows(shown.staleness)
        return HTMLResponse(page.render(o=shown, labels=LABELS, rows=rows, most=max([1, *(row[3] for row in rows)])))

    return made
