"""`lagrange evaluator`: scores published versions of a run while it trains.

Invariant: a result is of one version. On an engine of the evaluator's own no update reaches it; on the run's engines
(rollout/evaluation/served.py) an evaluation whose version is no longer served is given up as a whole, since the answers
that were done in time would be the short ones. Weights are held by hard links while they are needed, so that the
trainer's clean-up cannot take them away in between. Newest wins: versions that came and went meanwhile are passed over.

Results go into Redis, for monitor and Prometheus, and as {"evaluation": ...} into runs/<id>/metrics.jsonl (task,
version, step, evaluation_lag, scores); the best checkpoint by `evaluation.best` is kept in runs/<id>/best/.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from broker.errors import BrokerError
from broker.logs import configure_logs
from broker.queue import Broker
from broker.types import Snapshot, VersionRecord
from configs.load import ConfigError
from configs.schema import EvaluationTask, RunConfig
from configs.secrets import ENGINE_API_KEY, REDIS_PASSWORD, read_secret
from rollout.checkpoint import read_checkpoint
from rollout.client import EngineClient, InvalidAnswer, Sample, Sampling
from rollout.codec import FileCodec
from rollout.connect import connect_broker, stop_on_signal
from rollout.engines import EnginePool
from rollout.evaluation.best import hold, keep_best
from rollout.evaluation.engine import EngineFailed, evaluation_engine, load
from rollout.evaluation.run import Plan, Superseded, check_task, evaluate, in_words, result
from rollout.evaluation.served import Engines, OwnEngine, SharedEngines
from rollout.rewards import Judge, make_judge
from rollout.rewards.pool import PoolLimits
from rollout.tasks import Task, make_task
from rollout.threads import in_thread

LOG = structlog.get_logger()
T = TypeVar("T")
LOOK_S = 1.0
ALIVE_S = 30.0  # an evaluator that has not been heard of for so long is gone
BEAT_S = 5.0
LAST_TRIES = 3  # for the last version of a run that has ended


class Published(Protocol):
    """The broker as an evaluator sees it; see broker.queue.Broker."""

    def published(self) -> VersionRecord | None:
        """The newest published version."""

    def snapshot(self) -> Snapshot:
        """Where the run is."""

    def evaluator(self, seconds: float, *, begins: bool = False) -> bool:
        """Say that an evaluator lives; whether an evaluation was asked for."""

    def evaluated(self, record: Mapping[str, Any], words: str, seconds: float) -> None:
        """Hand in a result."""


def due(newest: VersionRecord | None, last_step: int | None, every_steps: int, ended: bool) -> bool:
    """Whether the newest version is to be evaluated: the first, then every `every_steps`, and the last of a run."""
    if newest is None or newest.step == last_step:
        return False
    return last_step is None or ended or newest.step >= last_step + every_steps


def main(config: RunConfig) -> int:
    """Entry point of `lagrange evaluator`: 0 when the run has ended, 1 if the engine fails, 2 if it cannot start."""
    configure_logs(config.run.id, "evaluator")
    try:
        if not config.evaluation.tasks:
            raise ConfigError("evaluation.tasks is empty. Name at least one task.")
        if config.model.path is None or config.redis.url is None:
            raise ConfigError("model.path and redis.url are needed. Use the configuration in the run's folder.")
        return asyncio.run(_serve(config))
    except ConfigError as error:
        LOG.error("cannot start", problem=str(error))
        return 2
    except EngineFailed as error:
        LOG.error("the evaluation's engine failed", problem=str(error))
        return 1


async def _serve(config: RunConfig) -> int:
    stop = stop_on_signal()
    broker = await connect_broker(config, read_secret(REDIS_PASSWORD), stop)
    if broker is None:
        return 0
    evaluator = Evaluator(config, broker)
    try:
        if config.evaluation.engines == "shared":
            async with _shared_engines(config, broker) as engines:
                await evaluator.run(stop, engines)
        else:
            timeout_s = config.weights.update_timeout_s
            async with evaluation_engine(config, 0) as engine:
                own = OwnEngine(engine.client, partial(load, engine.plan, timeout_s=timeout_s))
                await engine.during(evaluator.run(stop, own))
    finally:
        await evaluator.close()
    return 0


@contextlib.asynccontextmanager
async def _shared_engines(config: RunConfig, broker: Broker) -> AsyncIterator[SharedEngines]:
    checkpoint, key = read_checkpoint(config.model.path or Path()), read_secret(ENGINE_API_KEY)

    def connect(url: str) -> EngineClient:
        timeout_s, priority = config.rollout.generation_timeout_s, config.evaluation.priority
        return EngineClient(url, checkpoint, api_key=key, timeout_s=timeout_s, priority=priority)

    pool = EnginePool(broker, connect, 3 * config.redis.timeout_s)
    try:
        yield SharedEngines(pool, config.weights.update_timeout_s)
    finally:
        await pool.close()


class Evaluator:
    """Evaluates versions one after the other; `run` is its whole life."""

    def __init__(self, config: RunConfig, broker: Published) -> None:
        """Makes all tasks at once, so that what is wrong with one is said at the start. Raises ConfigError."""
        if config.model.path is None:
            raise ConfigError("model.path is not set")
        self._config, self._broker = config, broker
        self._codec = FileCodec(config.model.path)
        stop_ids = read_checkpoint(config.model.path).stop_ids
        self._sampling = Sampling(config.rollout.temperature, config.rollout.max_new_tokens, stop_ids)
        self._tasks = [(one, *_prepared(one, config)) for one in config.evaluation.tasks]
        for _, task, _ in self._tasks:
            check_task(task, self._codec)

    async def close(self) -> None:
        """End the processes of rewards."""
        for _, _, judge in self._tasks:
            await judge.close()

    async def run(self, stop: asyncio.Event, engines: Engines) -> None:
        """Until the run has ended and its last version is evaluated, or cannot be, or `stop`."""
        heart = asyncio.create_task(self._beat())
        try:
            await self._follow(stop, engines)
        finally:
            heart.cancel()

    async def _follow(self, stop: asyncio.Event, engines: Engines) -> None:
        last: int | None = None
        failures = 0
        while not stop.is_set():
            try:
                asked = await self._ask(partial(self._broker.evaluator, ALIVE_S))
                newest, snapshot = await self._ask(self._broker.published), await self._ask(self._broker.snapshot)
                ended = snapshot.status in ("finished", "stopped")
                if newest is not None and (asked or due(newest, last, self._config.evaluation.every_steps, ended)):
                    await self._ask(partial(self._broker.evaluator, ALIVE_S, begins=True))
                    if await _unless(stop, self._evaluate(newest, engines)):
                        last = newest.step
                    elif ended and (failures := failures + 1) >= LAST_TRIES:
                        LOG.error("the last version is not evaluated", version=newest.version, tries=failures)
                        return
                elif ended:
                    return
            except (BrokerError, TimeoutError) as error:
                LOG.warning("the registry is away", detail=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)

    async def _evaluate(self, version: VersionRecord, engines: Engines) -> bool:
        """All tasks on one version; False if it could not be had to the end."""
        held = self._config.run.folder / ".evaluated"
        try:
            await in_thread(partial(hold, Path(version.path), held), 600.0)
            await engines.prepare(held, version.version)
            for one, task, judge in self._tasks:
                await self._one(one, task, judge, version, engines, held)
        except (OSError, EngineFailed, TimeoutError) as error:
            LOG.warning("a version could not be loaded", version=version.version, problem=str(error))
            return False
        except Superseded as error:
            LOG.warning("an evaluation is given up", version=version.version, problem=str(error))
            return False
        finally:
            shutil.rmtree(held, ignore_errors=True)
        return True

    async def _one(
        self, one: EvaluationTask, task: Task, judge: Judge, version: VersionRecord, engines: Engines, held: Path
    ) -> None:
        """One task: its result goes where results go."""
        folder, label = self._config.run.folder, one.label or one.name

        async def generate(ids: Sequence[int], n: int) -> list[Sample | InvalidAnswer]:
            return await engines.generate(ids, n, self._sampling)

        plan = Plan(version.version, one.prompts, one.samples, self._config.rollout.concurrent_groups)
        answers = await evaluate(task, judge, self._codec, generate, plan)
        if not any(answers.rewards.values()):
            LOG.warning("no answer could be judged", task=label, problem=answers.last_error)
            return
        now = await self._ask(self._broker.snapshot)
        lag = now.version - version.version
        tags = {"label": label, "step": version.step, "evaluation_lag": lag, "time_ms": now.time_ms}
        record = result(one.name, plan, answers, **tags)
        metric = self._config.evaluation.best
        if metric is not None:
            better: bool = await in_thread(partial(keep_best, held, folder, record, metric), 600.0)
            if better:
                LOG.info("a new best checkpoint", version=version.version)
        with (folder / "metrics.jsonl").open("ab", buffering=0) as file:  # one write: other processes append, too
            file.write(json.dumps({"evaluation": record}).encode() + b"\n")
        await self._ask(partial(self._broker.evaluated, record, in_words(record), ALIVE_S))
        LOG.info("evaluated", task=label, version=version.version, lag=lag, seconds=record["seconds"])

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(BrokerError, TimeoutError):
                await self._ask(partial(self._broker.evaluator, ALIVE_S))
            await asyncio.sleep(BEAT_S)

    async def _ask(self, call: Callable[[], T]) -> T:
        return await in_thread(call, 3 * self._config.redis.timeout_s)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, bool]) -> bool:
    """What `work` gives; it is cancelled, and False comes out, when `stop` is set before."""
    working, told = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else False
    finally:
        working.cancel()
        told.cancel()


def _prepared(one: EvaluationTask, config: RunConfig) -> tuple[Task, Judge]:
    task, limits = make_task(one.name, one.seed, one.parameters), PoolLimits.of(config.rollout)
    return task, make_judge(task, seed=one.seed, parameters=one.parameters, limits=limits)
