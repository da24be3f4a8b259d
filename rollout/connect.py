"""The start of a process of rollouts: it can be told to stop, and waits for Redis.

Invariant: being told to stop ends the waiting at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial

import structlog

from broker.errors import BrokerError
from broker.queue import Broker
from configs.schema import RunConfig
from rollout.threads import in_thread

LOG = structlog.get_logger()


def stop_on_signal() -> asyncio.Event:
    """What SIGTERM and SIGINT set from now on; to be called in the event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def connect_broker(config: RunConfig, password: str | None, stop: asyncio.Event) -> Broker | None:
    """A broker of the run, after waiting for Redis as long as it takes; None when told to stop."""
    open_broker = partial(Broker.of_run, config, password)
    told = asyncio.ensure_future(stop.wait())
    wait = 0.1
    try:
        while not stop.is_set():
            attempt = asyncio.ensure_future(in_thread(open_broker, 3 * config.redis.timeout_s))
            await asyncio.wait({attempt, told}, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                attempt.cancel()
                return None
            try:
                return attempt.result()
            except (BrokerError, TimeoutError) as error:
                LOG.warning("waiting for Redis", detail=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(told), wait)
            wait = min(2 * wait, 2.0)
        return None
    finally:
        told.cancel()
