"""`lagrange evaluator`: scores published versions of a run while it trains.

Invariant: a result is of one version: the engine is this process's own, no update reaches it, and each answer's
version is checked all the same. Weights are held by hard links while they are needed, so that the trainer's clean-up
cannot take them away in between. Newest wins: versions that came and went meanwhile are not evaluated.

Results: one line each in runs/<id>/evaluations.jsonl (task, version, step, evaluation_lag, scores); the checkpoint with
the best value of `evaluation.best` is kept in runs/<id>/best/.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog

from broker.errors import BrokerError
from broker.logs import configure_logs
from broker.types import Snapshot, VersionRecord
from configs.load import ConfigError
from configs.schema import EvaluationTask, RunConfig
from configs.secrets import REDIS_PASSWORD, read_secret
from rollout.client import EngineClient, InvalidAnswer, Sample, Sampling
from rollout.codec import FileCodec
from rollout.connect import connect_broker
from rollout.evaluation.engine import EngineFailed, evaluation_engine, load
from rollout.evaluation.run import Plan, evaluate, result
from rollout.rewards import Judge, make_judge
from rollout.rewards.pool import PoolLimits, child_environment
from rollout.tasks import Task, make_task
from rollout.tasks.prepare import try_prompt
from rollout.threads import in_thread

LOG = structlog.get_logger()
LOOK_S = 1.0


class Published(Protocol):
    """The broker as an evaluator sees it."""

    def published(self) -> VersionRecord | None:
        """The newest published version."""

    def snapshot(self) -> Snapshot:
        """Where the run is."""


def due(newest: VersionRecord | None, last_step: int | None, every_steps: int, ended: bool) -> bool:
    """Whether the newest version is to be evaluated: the first, then every `every_steps`, and the last of a run."""
    if newest is None or newest.step == last_step:
        return False
    return last_step is None or ended or newest.step >= last_step + every_steps


def best_value(record: dict[str, Any], metric: str) -> float | None:
    """The value that `evaluation.best`, "task/score" as in "aime24/avg@8", names; None if this record has none."""
    task, _, score = metric.rpartition("/")
    if record.get("label") != task or not isinstance(record.get(score), dict):
        return None
    return float(record[score]["value"])


def hold(source: Path, target: Path) -> None:
    """Hard links of a version's files (copies across file systems). Raises OSError if they went away."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=_link)


def keep_best(held: Path, folder: Path, record: dict[str, Any], metric: str) -> bool:
    """Make `held` the run's best checkpoint if it is better than what is kept; whether it was."""
    value = best_value(record, metric)
    if value is None:
        return False
    note = folder / "best.json"
    if note.exists() and json.loads(note.read_text(encoding="utf-8"))["value"] >= value:
        return False
    aside = folder / ".best.new"
    hold(held, aside)
    shutil.rmtree(folder / "best", ignore_errors=True)
    aside.rename(folder / "best")
    text = json.dumps({"metric": metric, "value": value, "version": record["version"], "step": record["step"]})
    (folder / ".best.json").write_text(text, encoding="utf-8")
    (folder / ".best.json").replace(note)
    return True


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
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    broker = await connect_broker(config, read_secret(REDIS_PASSWORD), stop)
    if broker is None:
        return 0
    evaluator = Evaluator(config, broker)
    try:
        async with evaluation_engine(config, 0) as (client, plan):
            timeout_s = config.weights.update_timeout_s
            await evaluator.run(stop, client, lambda folder, version: load(plan, folder, version, timeout_s))
    finally:
        await evaluator.close()
    return 0


class Evaluator:
    """Evaluates versions one after the other; `run` is its whole life."""

    def __init__(self, config: RunConfig, broker: Published) -> None:
        """Makes all tasks at once, so that what is wrong with one is said at the start. Raises ConfigError."""
        if config.model.path is None:
            raise ConfigError("model.path is not set")
        self._config, self._broker = config, broker
        self._codec = FileCodec(config.model.path)
        self._tasks = [(one, *_prepared(one, config)) for one in config.evaluation.tasks]
        for _, task, _ in self._tasks:
            try_prompt(task, self._codec)

    async def close(self) -> None:
        """End the processes of rewards."""
        for _, _, judge in self._tasks:
            await judge.close()

    async def run(self, stop: asyncio.Event, client: EngineClient, load_version: Any) -> None:
        """Until the run has ended and its last version is evaluated, or `stop`. load_version: (folder, version)."""
        last: int | None = None
        while not stop.is_set():
            try:
                newest, snapshot = await self._ask(self._broker.published), await self._ask(self._broker.snapshot)
            except (BrokerError, TimeoutError) as error:
                LOG.warning("the registry is away", detail=str(error))
            else:
                ended = snapshot.status in ("finished", "stopped")
                if newest is not None and due(newest, last, self._config.evaluation.every_steps, ended):
                    if await _unless(stop, self._evaluate(newest, client, load_version)):
                        last = newest.step
                elif ended:
                    return
            try:
                await asyncio.wait_for(stop.wait(), LOOK_S)
            except TimeoutError:
                continue

    async def _evaluate(self, version: VersionRecord, client: EngineClient, load_version: Any) -> bool:
        folder = self._config.run.folder
        held = folder / ".evaluated"
        try:
            await in_thread(partial(hold, Path(version.path), held), 600.0)
            await load_version(held, version.version)
        except (OSError, EngineFailed, TimeoutError) as error:
            LOG.warning("a version could not be loaded", version=version.version, problem=str(error))
            return False
        for one, task, judge in self._tasks:
            plan = Plan(version.version, one.prompts, one.samples, self._config.rollout.concurrent_groups)
            sampling = self._sampling(client)

            async def generate(ids: Sequence[int], n: int, s: Sampling = sampling) -> list[Sample | InvalidAnswer]:
                return await client.generate(ids, n, s)

            answers = await evaluate(task, judge, self._codec, generate, plan)
            if not any(answers.rewards.values()):
                LOG.warning("no answer could be judged", task=one.name, problem=answers.last_error)
                continue
            now = await self._ask(self._broker.snapshot)
            lag = now.version - version.version
            record = result(one.name, plan, answers, label=one.label or one.name, step=version.step, evaluation_lag=lag)
            record["time_ms"] = now.time_ms
            with (folder / "evaluations.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            LOG.info("evaluated", task=record["label"], version=version.version, lag=lag, seconds=record["seconds"])
            if self._config.evaluation.best and keep_best(held, folder, record, self._config.evaluation.best):
                LOG.info("a new best checkpoint", version=version.version)
        shutil.rmtree(held, ignore_errors=True)
        return True

    def _sampling(self, client: EngineClient) -> Sampling:
        rollout = self._config.rollout
        return Sampling(rollout.temperature, rollout.max_new_tokens, client.checkpoint.stop_ids)

    async def _ask(self, call: Any) -> Any:
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
    rollout = config.rollout
    task = make_task(one.name, one.seed, one.parameters)
    limits = PoolLimits(rollout.reward_processes, rollout.reward_timeout_s, rollout.reward_memory_mb)
    environment = child_environment(os.environ)
    return task, make_judge(task, seed=one.seed, parameters=one.parameters, limits=limits, environment=environment)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)
    return target
