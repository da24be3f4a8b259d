"""Faults that a test scripts with `FakeEngine.fail`.

Invariant: a fault meets only requests of its path, as often as it says, and does to the connection what its kind says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse


@dataclass
class Fault:
    """What happens to the next `times` requests of `path`.

    kind: "status" answers `code` with `body` and does nothing; "hang" does not answer for `seconds`, then goes on;
    "garbage" answers 200 with a body that is not JSON; "drop" closes the connection without an answer (500 in-process);
    "after" carries the request out, and then answers `code` with `body`; "mutate" carries it out and passes the JSON
    answer through `change`; "lie" answers success without doing anything.
    Of a streamed answer, after `messages` of it: "cut" closes the connection in the middle of the next one, "stall"
    sends nothing more for `seconds`, "noise" sends what is no JSON in place of the next one.
    """

    path: str
    kind: Literal["status", "hang", "garbage", "drop", "after", "mutate", "lie", "cut", "stall", "noise"]
    times: int = 1
    code: int = 500
    body: dict[str, Any] = field(default_factory=lambda: {"error": {"message": "scripted fault"}})
    seconds: float = 3600.0
    change: Callable[[Any], Any] | None = None
    messages: int = 0


class EngineDied(Exception):
    """Ends a stream without its end, as the death of a server does."""


async def meet(fault: Fault, request: Request, call_next: Any) -> Response:
    """The answer to a request that meets a fault. call_next: carries the request out."""
    if fault.kind == "hang":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_disconnect(request), fault.seconds)
    refusals: dict[str, Callable[[], Response]] = {
        "status": lambda: JSONResponse(fault.body, status_code=fault.code),
        "garbage": lambda: PlainTextResponse("<html>not json</html>"),
        "lie": lambda: JSONResponse({"success": True, "message": "Success", "status": "ok", "num_paused_requests": 0}),
        "drop": _Dropped,
    }
    if fault.kind in refusals:
        return refusals[fault.kind]()
    answer: Response = await call_next(request)
    if fault.kind == "after":
        return JSONResponse(fault.body, status_code=fault.code)
    if fault.kind in ("cut", "stall", "noise"):
        return StreamingResponse(_spoil(fault, answer), media_type="text/event-stream")
    if fault.kind == "mutate" and fault.change is not None:
        content = b"".join([part async for part in answer.body_iterator])  # type: ignore[attr-defined]
        return JSONResponse(fault.change(json.loads(content)), status_code=answer.status_code)
    return answer


async def _spoil(fault: Fault, answer: Response) -> AsyncIterator[bytes]:
    sent = 0
    async for part in answer.body_iterator:  # type: ignore[attr-defined]
        if sent == fault.messages:
            if fault.kind == "stall":
                await asyncio.sleep(fault.seconds)  # cancelled when the client goes away
            yield b"data: <html>not json</html>\n\n" if fault.kind == "noise" else part[: len(part) // 2]
            if fault.kind == "cut":
                raise EngineDied
        else:
            yield part
        sent += 1


async def _disconnect(request: Request) -> None:
    while not await request.is_disconnected():  # noqa: ASYNC110 (ASGI has no event for it)
        await asyncio.sleep(0.01)


class _Dropped(Response):
    """Announces a body and ends without it: the client sees a connection that broke in the middle of an answer."""

    def __init__(self) -> None:
        super().__init__(content=b"", headers={"content-length": "10"})
