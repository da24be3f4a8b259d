"""A worker around a fake engine, a real broker and the tiny model's files."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from broker.queue import Broker
from broker.traces import NO_TRACES, Traces
from broker.types import EngineRecord, EngineState, Group, Refused
from configs.schema import RunConfig, TinyModel
from rollout.checkpoint import Checkpoint, read_checkpoint
from rollout.client import EngineClient
from rollout.codec import FileCodec
from rollout.tasks import Task, make_task
from rollout.worker import Worker
from services.local.tiny_model import write_tiny_model
from tests.broker.helpers import Run
from tests.fakes.engine import FakeEngine

ENGINE = "engine-0"
CHECKPOINT = Checkpoint(Path("/model"), layers=2, experts=8, top_k=2, vocabulary=32, context=512, stop_ids=(2,))


def tiny_folder(directory: Path) -> Path:
    """The tiny model's files below `directory`."""
    folder = directory / "model"
    write_tiny_model(TinyModel(), 0, folder)
    return folder


def make_worker(
    config: RunConfig,
    broker: Any,
    folder: Path,
    *,
    task: Task | None = None,
    name: str = "w0",
    key: str | None = None,
    traces: Traces = NO_TRACES,
) -> Worker:
    """A worker on `broker` with the tokenizer of `folder`. key: the engines'."""
    checkpoint = read_checkpoint(folder)
    return Worker(
        name,
        config,
        broker=broker,
        task=task or make_task("max-digit", 0),
        codec=FileCodec(folder),
        checkpoint=checkpoint,
        connect=lambda url: EngineClient(url, checkpoint, api_key=key, timeout_s=config.rollout.generation_timeout_s),
        traces=traces,
    )


def serving(broker: Broker, url: str, version: int, engine_id: str = ENGINE) -> None:
    """Register an engine that serves `version`."""
    broker.register_engine(EngineRecord(engine_id, url, EngineState.SERVING, version))


@contextlib.contextmanager
def run_with(broker: Broker, engine: FakeEngine) -> Iterator[Run]:
    """A run that has begun, whose only engine is `engine`, which serves version 0."""
    with engine.serve() as url:
        run = Run(broker).start()
        broker.remove_engine("engine-1")
        serving(broker, url, 0)
        yield run


@contextlib.asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[asyncio.Event]:
    """A worker at work; ends it at the end; only one that hangs needs so long."""
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await asyncio.wait_for(task, 30.0)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition that other tasks or threads bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        await asyncio.sleep(0.01)


def ready_groups(run: Run, groups: int) -> list[Group]:
    """Pull and fetch `groups` groups."""
    batch = run.pull(groups)
    return run.broker.fetch([delivery.group_id for delivery in batch])


def ready(broker: Broker) -> int:
    """Groups that wait in the queue."""
    return broker.snapshot().groups.ready


def reason(answer: object) -> str:
    """The word of a refusal."""
    assert isinstance(answer, Refused), answer
    return answer.reason
