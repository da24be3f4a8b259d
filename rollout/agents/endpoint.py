"""The OpenAI-compatible endpoint of one worker, on a port of this machine alone.

Invariant: each call names a session by its key, which only that episode's agent knows and which is worth nothing after
it; bodies are bounded, and every answer is one of OpenAI's shapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout.agents.session import Session
from rollout.agents.wire import Refused, models, read_request

LARGEST_BODY = 8 << 20  # bytes
STOP_S = 2.0


class Endpoint:
    """Serves from `start` to `close`, in the caller's event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._numbers = itertools.count()
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """base_url for a client. Starts the server if it does not run yet."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            routes = [
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ]
            config = uvicorn.Config(
                Starlette(routes=routes),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
            self._server = _Server(config)
            self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    @contextlib.contextmanager
    def serving(self, session: Session) -> Iterator[str]:
        """Serve a session; gives its key."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            session.close()

    async def close(self) -> None:
        """End the server."""
        if self._server is None or self._serving is None or self._listener is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=STOP_S)
        self._serving.cancel()
        self._listener.close()

    async def _completions(self, request: Request) -> Response:
        try:
            session = self._session(request)
            asked = read_request(await _body(request), session.temperature)
            return JSONResponse(await session.complete(asked, f"{next(self._numbers)}"))
        except Refused as error:
            return _refusal(error)
        except ClientDisconnect:  # nobody reads the answer
            return Response(status_code=499)

    async def _models(self, request: Request) -> Response:
        try:
            self._session(request)
        except Refused as error:
            return _refusal(error)
        return JSONResponse(models())

    def _session(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            raise Refused(401, "invalid_api_key", "The key is not that of an episode under way.")
        return session


class _Server(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise Refused(413, "too_large", f"The body is larger than {LARGEST_BODY} bytes.")
    return bytes(body)


def _refusal(error: Refused) -> Response:
    """x-should-retry: OpenAI's clients would repeat 429 and 5xx by themselves; another try would not help here."""
    return JSONResponse(error.body(), error.status, headers={"x-should-retry": "false"})
