"""`lagrange weight-sync`: keeps every engine on the newest published version.

Invariant: at most the time of one probe passes between an engine's end (or an update's failure) and its leaving the
routable ones, and whatever this process was doing when it was killed is found and mended by the next one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from functools import partial

import httpx
import structlog
from fastapi import FastAPI

from broker.errors import BrokerError
from broker.logs import configure_logs
from broker.queue import Broker
from configs.load import ConfigError
from configs.schema import RunConfig
from configs.secrets import ENGINE_API_KEY, REDIS_PASSWORD, read_secret
from rollout.command import NCCL_AS_SGLANG, engine_environment
from rollout.engine import ADVERTISED_HOST
from services.http import run_service
from services.weight_sync.app import create_app
from services.weight_sync.discovery import Discovery
from services.weight_sync.distributed import Distributed, Reach
from services.weight_sync.engine_client import Timeouts
from services.weight_sync.lifecycle import Policy
from services.weight_sync.reconciler import Reconciler, Settings
from services.weight_sync.strategy import Strategy
from services.weight_sync.transports import Delta, Disk, Transport

log = structlog.get_logger()
MAX_CONNECTIONS = 256


def run(config: RunConfig) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code (2: configuration, 3: port, 4: Redis)."""
    configure_logs(config.run.id, "weight-sync")
    if config.redis.url is None:
        log.error("cannot start", problem="redis.url is not set. Set it, or start the run with `lagrange up`.")
        return 2
    try:
        password = read_secret(REDIS_PASSWORD)
        settings = settings_of(config, os.environ)
    except ConfigError as error:
        log.error("cannot start", problem=str(error))
        return 2
    try:
        broker = Broker.of_run(config, password)
    except BrokerError as error:
        log.error("cannot start", problem=str(error))
        return 4

    def build(token: str | None) -> FastAPI:
        http = httpx.AsyncClient(limits=httpx.Limits(max_connections=MAX_CONNECTIONS), trust_env=False)
        reconciler = Reconciler(broker, http, settings, partial(transport_of, config, os.environ))
        discovery = Discovery(reconciler, config.engine.urls)
        return create_app(reconciler, token, closing=broker.close, http=http, beside=discovery.run)

    return run_service("weight-sync", config.weight_sync, build)


def settings_of(config: RunConfig, environment: Mapping[str, str]) -> Settings:
    """The loop's settings from a run's configuration. Raises ConfigError if the engines' key cannot be read."""
    weights, engine = config.weights, config.engine
    exact = engine.device == "cpu" and engine.tensor_parallel == 1
    return Settings(
        policy=Policy(
            drain=weights.pause == "drain",
            tries=weights.update_tries,
            join_patience_s=engine.start_timeout_s,
        ),
        timeouts=Timeouts(load=weights.update_timeout_s, drain=weights.update_timeout_s / 2),
        strategy=Strategy(weights.strategy, weights.rolling_engines),
        interval_s=weights.probe_interval_s,
        exact_dtype=engine.dtype if exact else None,
        api_key=read_secret(ENGINE_API_KEY, environment),
    )


def transport_of(config: RunConfig, environment: Mapping[str, str], wake: Callable[[], None]) -> Transport:
    """How weights travel in a run. wake: called when something that was waited for is there."""
    weights, engine = config.weights, config.engine
    if weights.transport == "delta":
        return Delta(weights.local_wait_s)
    if weights.transport == "distributed":
        near = engine.host == "127.0.0.1" and not engine.urls
        reach = Reach(
            python=engine.python,
            address="127.0.0.1" if near else environment.get(ADVERTISED_HOST) or socket.gethostname(),
            ranks=engine.tensor_parallel,
            backend="nccl" if engine.device == "cuda" else "gloo",
            bucket_bytes=weights.bucket_mb << 20,
            seconds=weights.update_timeout_s,
            # Not the engines' share of the GPUs: NCCL refuses a group with two ranks on one.
            environment=NCCL_AS_SGLANG
            | engine_environment(engine, environment)
            | {name: value for name, value in environment.items() if name == "CUDA_VISIBLE_DEVICES"},
        )
        return Distributed(reach, wake)
    return Disk()
