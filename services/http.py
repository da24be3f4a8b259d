"""What both HTTP services share: who may call, what may come in, what goes out when something fails.

Invariant: no answer holds a path, a secret or a stack trace; a body above the limit is refused before it is read; a
token is compared in constant time; an answer above 299 always is `{"error": {"reason", "message"}}`.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Annotated, Any

import structlog
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.load import ConfigError
from configs.schema import ServiceSection
from configs.secrets import API_TOKEN, read_secret
from configs.sections.services import base_url

log = structlog.get_logger()
BEARER = HTTPBearer(auto_error=False, description="LAGRANGE_API_TOKEN")
OPEN_API = "LAGRANGE_ALLOW_OPEN_API"
MAX_BODY_BYTES = 64 << 10
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# FastAPI's interactive documentation loads its scripts from elsewhere: it is left out, the OpenAPI document stays.
NO_EXTERNAL_DOCS: dict[str, Any] = {"docs_url": None, "redoc_url": None}


class Problem(BaseModel):
    """Why something was not done."""

    reason: str = Field(description="A stable word for programs.", examples=["unavailable"])
    message: str = Field(description="A sentence for people.", examples=["Redis does not answer."])


class ErrorAnswer(BaseModel):
    """Body of every answer above 299."""

    error: Problem


class State(BaseModel):
    """Body of /healthz and /readyz: the process works."""

    status: str = Field("ok", examples=["ok"])


class Refusal(HTTPException):
    """An answer above 299, raised by handlers."""

    def __init__(self, status: int, reason: str, message: str, **seen: int) -> None:
        """seen: what else stands in the body, beside `error`."""
        super().__init__(status_code=status, detail={"reason": reason, "message": message, "seen": seen})


# What the OpenAPI document says of every request that changes something: this module answers so by itself.
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorAnswer, "description": "The bearer token is missing or wrong."},
    403: {"model": ErrorAnswer, "description": "Another site's page asked for it."},
    411: {"model": ErrorAnswer, "description": "The body comes without its length."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    422: {"model": ErrorAnswer, "description": "The body is not what is expected."},
    503: {"model": ErrorAnswer, "description": "Redis does not answer."},
}


class OpenServiceError(Exception):
    """The service would listen beyond this machine without a token."""


def token_matches(given: str, token: str) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return hmac.compare_digest(given.encode(), token.encode())


def requires_token(token: str | None) -> Any:
    """A FastAPI dependency: 401 without the bearer token; lets everyone pass if no token is configured."""
    if token is None:
        return Depends(_anyone)

    def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if credentials is None or not token_matches(credentials.credentials, token):
            raise HTTPException(
                401,
                {"reason": "unauthorised", "message": "Send the token: Authorization: Bearer <LAGRANGE_API_TOKEN>."},
                {"www-authenticate": "Bearer"},
            )

    return Depends(check)


def _anyone() -> None:
    """Says in the OpenAPI document, too, that no token is needed."""


def switched_on(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a variable that guards something is set to 1; unset, empty or 0: no. Raises ConfigError for other words,
    which somebody may mean as yes."""
    text = environment.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name} is {text!r}. Set it to 1, or leave it unset.")
    return text == "1"


def refuse_open_service(host: str, token: str | None, environment: Mapping[str, str]) -> None:
    """Raise OpenServiceError if `host` is reachable from elsewhere, no token is set, and that was not asked for."""
    if token is not None or is_loopback(host) or switched_on(OPEN_API, environment):
        return
    raise OpenServiceError(
        f"The service would listen on {host} for everyone. Set LAGRANGE_API_TOKEN (or LAGRANGE_API_TOKEN_FILE), listen "
        "on 127.0.0.1, or set LAGRANGE_ALLOW_OPEN_API=1 if something in front of it decides who may call."
    )


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def harden(app: FastAPI) -> None:
    """Give an application the error bodies, the headers and the limits of this module."""
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(_Guard)


def error_answer(
    status: int, reason: str, message: str, headers: Mapping[str, str] | None = None, **seen: int
) -> JSONResponse:
    """An error body with its status."""
    body = ErrorAnswer(error=Problem(reason=reason, message=message))
    return JSONResponse(body.model_dump() | seen, status, {**HEADERS, **(headers or {})})


async def _http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    words = {404: "There is nothing at this address.", 405: "This address does not take that method."}
    detail: Any = error.detail
    if error.status_code == 400 and not isinstance(detail, dict):  # the framework's word for a body that is no text
        return error_answer(422, "invalid", "body: has to be JSON in UTF-8.")
    if not isinstance(detail, dict):
        reason = {404: "not-found", 405: "method"}.get(error.status_code, "refused")
        detail = {"reason": reason, "message": words.get(error.status_code, "The request was refused.")}
    return error_answer(error.status_code, detail["reason"], detail["message"], error.headers, **detail.get("seen", {}))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if first["loc"] == ("body",) and first["type"] != "missing" and not kind.endswith(("/json", "+json")):
        return error_answer(422, "invalid", "body: send JSON, and say so: Content-Type: application/json.")
    where = ".".join(str(part) for part in first["loc"])[:100]
    return error_answer(422, "invalid", f"{where}: {str(first['msg'])[:200]}")


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("request failed", path=request.url.path, error=type(error).__name__, exc_info=error)
    return error_answer(500, "internal", "The request failed; the service's log says why.")


class _Guard:
    """Bounds bodies, adds headers, and refuses writes that another site's page asks a browser to make."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = _refusal(scope["method"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, _bounded(receive), _with_headers(send))


def _refusal(method: str, headers: Mapping[str, str]) -> JSONResponse | None:
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        return error_answer(413, "too-large", f"The body may have at most {MAX_BODY_BYTES} bytes.")
    if "transfer-encoding" in headers:
        return error_answer(411, "length-required", "Send the body with its content-length.")
    from_elsewhere = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if from_elsewhere and method not in ("GET", "HEAD", "OPTIONS"):
        return error_answer(403, "cross-site", "Another site's page may not do this.")
    return None


def _bounded(receive: Receive) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            return {"type": "http.disconnect"}
        return message

    return bounded


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in present]
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return with_headers


def listen(section: ServiceSection) -> socket.socket:
    """Bind the service's address; the socket knows the port if 0 was asked for. Raises OSError."""
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((section.host, section.port))
    except OSError:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """Base URL of a listener, as a browser on this machine would write it."""
    host, port = listener.getsockname()[:2]
    return base_url(scheme, host, port)


def check_certificate(section: ServiceSection) -> None:
    """Raise ConfigError if the section's certificate or key cannot be used (TLS 1.2 and newer is spoken)."""
    if section.cert_file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            section.cert_file, section.key_file, password=_no_password
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cert_file {section.cert_file} and key_file {section.key_file} cannot be used ({error}). Both have to be "
            "readable PEM files, the key without a password and of the certificate."
        ) from error


def _no_password() -> str:
    """OpenSSL would ask the terminal for it."""
    return ""


def serve_until_signal(app: FastAPI, listener: socket.socket, section: ServiceSection) -> None:
    """Serve until SIGINT or SIGTERM; open connections get two seconds to end."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        ws="none",
        ssl_certfile=section.cert_file,
        ssl_keyfile=section.key_file,
    )
    _Server(config, app).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends on a signal as on any other end: uvicorn's own raises it again, so that the exit code would be -15.

    Answers without an end (live streams) see `app.state.leaving` and end by themselves.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal."""
        self._app.state.leaving = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_service(
    name: str,
    section: ServiceSection,
    build: Callable[[str | None], FastAPI],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Listen, build the application with the token, serve. Returns the exit code; what went wrong is one log line."""
    environment = os.environ if environment is None else environment
    try:
        token = read_secret(API_TOKEN, environment)
        refuse_open_service(section.host, token, environment)
        check_certificate(section)
    except (ConfigError, OpenServiceError) as error:
        log.error("cannot start", service=name, problem=str(error))
        return 2
    try:
        listener = listen(section)
    except OSError as error:
        log.error(
            "cannot start",
            service=name,
            problem=f"{section.host}:{section.port}: {error.strerror}. Set another port, or 0 for a free one.",
        )
        return 3
    with listener:
        log.info("listening", service=name, url=address_of(listener, section.scheme))
        serve_until_signal(build(token), listener, section)
    return 0
