"""Steering a run over HTTP: the bound, admission, drain, checkpoint, dead letters.

Invariant: every command needs the bearer token; each that Redis got is in the event log, done or refused, with who
asked and why; 200 is answered only for what has happened in Redis by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeVar

import structlog
from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from broker.errors import BrokerError
from broker.queue import Command
from broker.types import Steered
from services.http import REFUSALS, ErrorAnswer, Refusal, requires_token

log = structlog.get_logger()
T = TypeVar("T")
LARGEST_LAG = 1024


class RefusedAnswer(ErrorAnswer):
    """What was refused, when and at which version: as of a command that is done."""

    time_ms: int = Field(description="Redis server time.", examples=[1795984726000])
    version: int = Field(description="The trainer's then.", examples=[42])


ANSWERS: dict[int | str, dict[str, Any]] = {
    **REFUSALS,
    403: {"model": ErrorAnswer, "description": "The monitor has no token, or another site's page asked for it."},
    409: {"model": RefusedAnswer, "description": "Not possible now; the reason says why. Nothing was changed."},
}


class Steerable(Protocol):
    """The broker as an operator uses it. Both raise BrokerError."""

    def steer(self, command: Command, value: int = 0, *, why: str = "", expected: int | None = None) -> Steered:
        """See broker.queue.Broker."""

    def requeue(self, prompt_index: int, *, why: str = "") -> Steered:
        """See broker.queue.Broker."""


class Order(BaseModel):
    """Who asks, and why: both go into the event log."""

    model_config = ConfigDict(extra="forbid")
    by: str = Field("", max_length=80, pattern=r"^[^\x00-\x1f\x7f]*$", examples=["ada"])
    reason: str = Field("", max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$", examples=["loss spikes since step 900"])


class LagOrder(Order):
    """The new bound. expected: change it only if it is this now (so that two people do not undo each other)."""

    max_lag: int = Field(ge=0, le=LARGEST_LAG, examples=[4])
    expected: int | None = Field(None, ge=0, le=LARGEST_LAG)


class Done(BaseModel):
    """A command that was carried out. time_ms: Redis server time; version: the trainer's then."""

    command: str = Field(examples=["lag"])
    detail: str = Field(examples=["max_lag 8 -> 4"])
    time_ms: int = Field(examples=[1795984726000])
    version: int = Field(examples=[42])


def why(order: Order | None) -> str:
    """The words for the event log."""
    if order is None:
        return "by api"
    return f"by {order.by or 'api'}" + (f": {order.reason}" if order.reason else "")


def router(broker: Steerable, token: str | None, *, open_to_all: bool = False) -> APIRouter:
    """The endpoints. Without a token all of them refuse, unless something in front decides (open_to_all)."""
    guard = requires_token(token) if token is not None or open_to_all else _nobody()
    made = APIRouter(prefix="/v1", responses=ANSWERS, dependencies=[guard], tags=["steering"])

    async def steer(request: Request, command: Command, order: Order | None, **options: Any) -> Done:
        return await carry_out(request, command, order, lambda: broker.steer(command, why=why(order), **options))

    async def carry_out(
        request: Request, command: str, order: Order | None, action: Callable[[], Steered], refusal: int = 409
    ) -> Done:
        found = await _ask(action)
        client = request.client.host if request.client else ""
        log.info("steering", command=command, done=found.done, detail=found.detail, why=why(order), client=client)
        if not found.done:
            raise Refusal(refusal, found.reason, _sentence(found.detail), time_ms=found.time_ms, version=found.version)
        return Done(command=command, detail=found.detail, time_ms=found.time_ms, version=found.version)

    @made.patch("/lag")
    async def lag(request: Request, order: LagOrder) -> Done:
        """Change max_lag in the running system; it holds from the next admission, submission and pull."""
        return await steer(request, "lag", order, value=order.max_lag, expected=order.expected)

    @made.post("/pause")
    async def pause(request: Request, order: Order | None = None) -> Done:
        """Start no more groups; what is in flight goes on."""
        return await steer(request, "pause", order)

    @made.post("/resume")
    async def resume(request: Request, order: Order | None = None) -> Done:
        """Start groups again: ends a pause and a drain."""
        return await steer(request, "resume", order)

    @made.post("/drain")
    async def drain(request: Request, order: Order | None = None) -> Done:
        """Start no more groups and train what is in flight, as far as it fills whole steps."""
        return await steer(request, "drain", order)

    @made.post("/checkpoint")
    async def checkpoint(request: Request, order: Order | None = None) -> Done:
        """Ask the trainer to save a checkpoint after its step; an event says when it is durable."""
        return await steer(request, "checkpoint", order)

    @made.post("/evaluate")
    async def evaluate(request: Request, order: Order | None = None) -> Done:
        """Ask for an evaluation now."""
        return await steer(request, "evaluate", order)

    @made.post("/dead-letters/{prompt_index}/requeue", responses={404: {"model": RefusedAnswer}})
    async def requeue(
        request: Request, prompt_index: Annotated[int, Path(ge=0, le=2**53 - 1)], order: Order | None = None
    ) -> Done:
        """Issue the prompt of a dead letter again, with all its tries."""
        return await carry_out(request, "requeue", order, lambda: broker.requeue(prompt_index, why=why(order)), 404)

    return made


def _nobody() -> Any:
    def refuse() -> None:
        raise Refusal(403, "no-token", "Steering needs a token: start the monitor with LAGRANGE_API_TOKEN.")

    return Depends(refuse)


async def _ask(action: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(action)
    except BrokerError as error:
        raise Refusal(503, "unavailable", "Redis does not answer, or does not hold this run (yet).") from error


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
