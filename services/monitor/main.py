"""`lagrange monitor`: shows a run over HTTP, and steers it for those who have the token.

Invariant: it keeps no state of its own, so that it may be started, stopped and killed at any time, and any number may
run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog
from fastapi import FastAPI

from broker.errors import BrokerError
from broker.logs import configure_logs
from broker.queue import Broker
from configs.load import ConfigError
from configs.schema import RunConfig
from configs.secrets import API_TOKEN, REDIS_PASSWORD, read_secret
from services.http import OPEN_API, run_service, switched_on
from services.monitor.app import create_app
from services.monitor.source import Source

log = structlog.get_logger()
REDIS_TIMEOUT_S = 2.0  # a page that waits longer is no use to anyone
PROTECT_READS = "LAGRANGE_API_PROTECT_READS"


def run(config: RunConfig) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code (2: configuration, 3: port, 4: Redis)."""
    configure_logs(config.run.id, "monitor")
    if config.redis.url is None:
        log.error("cannot start", problem="redis.url is not set. Set it, or start the run with `lagrange up`.")
        return 2
    try:
        password = read_secret(REDIS_PASSWORD)
        reads_are_guarded = reads_need_token(read_secret(API_TOKEN), os.environ)
        open_to_all = switched_on(OPEN_API, os.environ)
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
        return create_app(
            Source(broker),
            steer=broker,
            token=token,
            read_token=token if reads_are_guarded else None,
            open_to_all=token is None and open_to_all,
            adaptive=config.lag.adaptive,
            folder=config.run.folder,
            closing=broker.close,
        )

    return run_service("monitor", config.monitor, build)


def reads_need_token(token: str | None, environment: Mapping[str, str]) -> bool:
    """Whether reading needs the token, too. Raises ConfigError if it was asked for and there is none."""
    asked = switched_on(PROTECT_READS, environment)
    if asked and token is None:
        raise ConfigError(
            f"{PROTECT_READS} is set, but no token is. Set LAGRANGE_API_TOKEN (or LAGRANGE_API_TOKEN_FILE)."
        )
    return asked
