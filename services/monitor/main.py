"""`lagrange monitor`: shows a run over HTTP, and steers it for those who have the token.

Invariant: it keeps no state of its own, so that it may be started, stopped and killed at any time, and any number may
run.
"""

from __future__ import annotations

import os

import structlog
from fastapi import FastAPI

from broker.errors import BrokerError
from broker.logs import configure_logs
from broker.queue import Broker
from configs.load import ConfigError
from configs.schema import RunConfig
from configs.secrets import REDIS_PASSWORD, read_secret
from services.http import run_service
from services.monitor.app import create_app
from services.monitor.source import Source

log = structlog.get_logger()
REDIS_TIMEOUT_S = 2.0  # a page that waits longer is no use to anyone


def run(config: RunConfig) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code (2: configuration, 3: port, 4: Redis)."""
    configure_logs(config.run.id, "monitor")
    if config.redis.url is None:
        log.error("cannot start", problem="redis.url is not set. Set it, or start the run with `lagrange up`.")
        return 2
    try:
        password = read_secret(REDIS_PASSWORD)
    except ConfigError as error:
        log.error("cannot start", problem=str(error))
        return 2
    timeout_s = min(config.redis.timeout_s, REDIS_TIMEOUT_S)
    try:
        broker = Broker.of_run(config, password, timeout_s=timeout_s)
    except BrokerError as error:
        log.error("cannot start", problem=str(error))
        return 4

    def build(token: str | None) -> FastAPI:
        needed = os.environ.get("LAGRANGE_API_PROTECT_READS") == "1"
        return create_app(
            Source(broker),
            steer=broker,
            token=token,
            read_token=token if needed else None,
            open_to_all=token is None and os.environ.get("LAGRANGE_ALLOW_OPEN_API") == "1",
            adaptive=config.lag.adaptive,
            folder=config.run.folder,
            closing=broker.close,
        )

    return run_service("monitor", config.monitor, build)
