"""The process of `lagrange rollout`: reads what a worker needs, refuses what cannot work, and runs the worker.

Invariant: nothing is asked of Redis or an engine before the configuration, checkpoint and task are known to be usable.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from dataclasses import dataclass

import structlog

from broker.logs import configure_logs
from broker.traces import Traces, open_traces
from configs.load import ConfigError
from configs.rules import prompts_have_room
from configs.schema import RunConfig
from configs.secrets import ENGINE_API_KEY, REDIS_PASSWORD, read_secret
from rollout.checkpoint import Checkpoint, read_checkpoint
from rollout.client import EngineClient
from rollout.codec import Codec, FileCodec
from rollout.connect import connect_broker, stop_on_signal
from rollout.rewards import make_judge
from rollout.rewards.pool import PoolLimits
from rollout.rewards.shaping import Shaping
from rollout.samples import SampleLog
from rollout.tasks import Task, make_task
from rollout.tasks.prepare import try_prompt
from rollout.worker import Worker

LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker is made of, from its configuration and the environment. password: Redis'; key: the engines'."""

    task: Task
    codec: Codec
    checkpoint: Checkpoint
    password: str | None
    key: str | None


def main(config: RunConfig, index: int) -> int:
    """Entry point of `lagrange rollout`; index: number of this worker, 0, 1, ...

    Returns the exit code: 0 when the run is finished or after SIGTERM or SIGINT, 2 for a configuration that cannot be
    used. Waits for Redis, for the trainer and for engines as long as it takes.
    """
    configure_logs(config.run.id, f"worker-{index}")
    try:
        parts, traces = worker_parts(config), open_traces(config, f"worker-{index}")
    except ConfigError as error:
        LOG.error("cannot start", problem=str(error))
        return 2
    try:
        return asyncio.run(_serve(config, index, parts, traces))
    finally:
        traces.close()


def worker_parts(config: RunConfig) -> Parts:
    """Read what a worker needs. Raises ConfigError."""
    if config.redis.url is None:
        raise ConfigError("redis.url is not set. Set it, or start the run with `lagrange up`.")
    if config.model.path is None:
        raise ConfigError("model.path is not set. Set it, or start the run with `lagrange up`, which makes model.tiny.")
    checkpoint = read_checkpoint(config.model.path)
    if config.trainer.routing_replay == "off":
        checkpoint = checkpoint.without_routes()
    if problem := prompts_have_room(config, checkpoint.context):
        raise ConfigError(problem)
    task, codec = make_task(config.task.name, config.run.seed, config.task.parameters), FileCodec(config.model.path)
    try_prompt(task, codec)
    Shaping.of(config.task.shaping, config.rollout.max_new_tokens)  # says what is wrong with it
    return Parts(
        task=task,
        codec=codec,
        checkpoint=checkpoint,
        password=read_secret(REDIS_PASSWORD),
        key=read_secret(ENGINE_API_KEY),
    )


async def _serve(config: RunConfig, index: int, parts: Parts, traces: Traces) -> int:
    stop = stop_on_signal()
    broker = await connect_broker(config, parts.password, stop)
    if broker is None:
        return 0

    def connect(url: str) -> EngineClient:
        return EngineClient(url, parts.checkpoint, api_key=parts.key, timeout_s=config.rollout.generation_timeout_s)

    # Unique: a worker that starts again must not pass for the one that died, nor for one on another machine.
    worker = Worker(
        f"worker-{index}@{socket.gethostname()}-{os.getpid()}",
        config,
        broker=broker,
        task=parts.task,
        codec=parts.codec,
        checkpoint=parts.checkpoint,
        connect=connect,
        traces=traces,
        samples=SampleLog(config.run.folder / "samples" / f"worker-{index}.jsonl", parts.codec),
        judge=make_judge(
            parts.task,
            seed=config.run.seed,
            parameters=config.task.parameters,
            limits=PoolLimits.of(config.rollout),
        ),
    )
    gc.freeze()  # what was imported stays: no collection need look at it again
    await worker.run(stop)
    LOG.info("worker ends", **worker.counters.totals())
    return 0
