"""Leave to begin a group: a free place, an engine that serves, and the broker's word.

Invariant: a ticket that the broker gave comes out of `next`, or of `left_behind` if `next` was cancelled meanwhile; and
every wait is counted, by its reason (docs/metrics.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from functools import partial

import structlog

from broker.errors import BrokerError
from broker.types import EngineRecord, Refused, Ticket
from configs.schema import RunConfig
from rollout.counters import Counters
from rollout.engines import EnginePool
from rollout.ports import RolloutBroker
from rollout.prompts import Prompts
from rollout.threads import in_thread

LOG = structlog.get_logger()
FIRST_WAIT_S = {"bound": 0.01, "engine": 0.1}  # after a refusal, by reason; 0.25 for any other
LONGEST_WAIT_S = {"bound": 0.1, "engine": 0.5}  # the wait grows up to this; 2.0 for any other
UNAVAILABLE = (BrokerError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group that may begin. engine: of its admission. asked_ns: since the epoch, when its place was free."""

    ticket: Ticket
    engine: EngineRecord
    asked_ns: int


class Admission:
    """Of one worker. asking: the last question to the broker, which may go on when who asked was cancelled."""

    def __init__(
        self,
        worker: str,
        config: RunConfig,
        *,
        broker: RolloutBroker,
        pool: EnginePool,
        prompts: Prompts,
        counters: Counters,
    ) -> None:
        """worker: who asks, by its name in the run. prompts: whose failures slow the asking down."""
        self._worker, self._broker, self._pool, self._prompts, self._counters = worker, broker, pool, prompts, counters
        self._broker_s = 3 * config.redis.timeout_s
        self._free = asyncio.Semaphore(config.rollout.concurrent_groups)
        self.asking: asyncio.Task[Ticket | Refused] | None = None

    def ended(self) -> None:
        """A group that was admitted has ended: its place is free."""
        self._free.release()

    async def next(self) -> Admitted | None:
        """Wait for a free place, an engine and the broker's leave; None when the run is finished."""
        await self._free.acquire()
        asked_ns = time.time_ns()
        await self._slow_down()
        newest_refused, last_reason, wait = -1, "", 0.0
        while True:
            engine, answer = await self._ask(newest_refused + 1)
            if isinstance(answer, Ticket):
                assert engine is not None  # no ticket without one
                return Admitted(answer, engine, asked_ns)
            reason, detail = answer.reason, answer.detail
            if reason == "finished":
                LOG.info("the run is finished", detail=detail)
                return None
            if reason == "bound" and engine is not None:
                newest_refused = engine.version  # a newer engine may be within the bound: ask for one at once
                if await self._newer(newest_refused):
                    continue
            newest_refused = -1
            wait = min(1.5 * wait, LONGEST_WAIT_S.get(reason, 2.0)) if reason == last_reason else 0.0
            wait = wait or FIRST_WAIT_S.get(reason, 0.25)
            if reason not in (last_reason, "bound"):
                LOG.info("waiting for admission", reason=reason, detail=detail)
            last_reason = reason
            began = time.monotonic()
            await self._pool.changed(wait * random.uniform(0.8, 1.0))
            self._waited(reason, began)

    def left_behind(self) -> Ticket | None:
        """The ticket of the last question, which nobody may have taken; None while it is not answered."""
        asked = self.asking
        if asked is None or not asked.done() or asked.cancelled() or asked.exception() is not None:
            return None
        answer = asked.result()
        return answer if isinstance(answer, Ticket) else None

    async def _slow_down(self) -> None:
        """Wait after prompts that failed, which they do at once. Past the end of a data set, too, one asks on: a prompt
        before it may be issued again."""
        if (failures := self._prompts.failures) > 1:
            began = time.monotonic()
            await asyncio.sleep(min(0.05 * failures, 2.0))
            self._waited("prompt", began)

    async def _ask(self, at_least: int) -> tuple[EngineRecord | None, Ticket | Refused]:
        """An engine of version `at_least` or newer, and what the broker says of it."""
        engine = None
        try:
            engine = await self._pool.pick(at_least=at_least)
            if engine is None:
                return None, Refused("engine", "no engine is routable")
            call = partial(self._broker.admit, self._worker, engine.engine_id)
            self.asking = asyncio.create_task(in_thread(call, self._broker_s))
            return engine, await asyncio.shield(self.asking)  # cancelled or not, a ticket may come of it
        except UNAVAILABLE as error:
            return engine, Refused("unavailable", str(error))

    async def _newer(self, version: int) -> bool:
        with contextlib.suppress(*UNAVAILABLE):
            return await self._pool.pick(at_least=version + 1) is not None
        return False

    def _waited(self, reason: str, began: float) -> None:
        """Count a wait. began: monotonic seconds."""
        self._counters.add("admission_wait_seconds", time.monotonic() - began)
        self._counters.add(f"admission_wait_{reason}_seconds", time.monotonic() - began)
