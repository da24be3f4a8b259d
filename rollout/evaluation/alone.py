"""`lagrange eval CHECKPOINT --task NAME --samples 8`: one engine, one checkpoint, one task; no Redis, no run.

Invariant: nothing is left of it but the record that it returns, and, if it fails, the engine's log. A version that a
run published cannot be taken away meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.load import ConfigError, validated
from configs.schema import RunConfig
from rollout.checkpoint import read_checkpoint
from rollout.client import InvalidAnswer, Sample, Sampling
from rollout.codec import FileCodec
from rollout.evaluation.best import hold
from rollout.evaluation.engine import evaluation_engine
from rollout.evaluation.run import Plan, check_task, evaluate, result
from rollout.rewards import make_judge
from rollout.rewards.pool import PoolLimits
from rollout.tasks import make_task


def alone_config(checkpoint: Path, task: str, parameters: Mapping[str, Any], settings: Mapping[str, Any]) -> RunConfig:
    """A configuration with what an evaluation needs. settings: dotted names to values. Raises ConfigError."""
    tree: dict[str, Any] = {
        "run": {"id": f"eval-{os.getpid()}", "steps": 1},
        "lag": {"max": 0},
        "model": {"path": checkpoint},
        "task": {"name": task, "parameters": dict(parameters)},
        "rollout": {"max_new_tokens": 1024},
        "trainer": {"optimizer": {"learning_rate": 1.0}},
    }
    for dotted, value in settings.items():
        section, _, name = dotted.partition(".")
        if section not in ("run", "task", "rollout", "engine") or not name:
            raise ConfigError(f"--set {dotted}: an evaluation has run.*, task.*, rollout.* and engine.*")
        tree.setdefault(section, {})[name] = value
    return validated(tree, "eval")


@contextlib.contextmanager
def held(checkpoint: Path) -> Iterator[Path]:
    """Where `checkpoint` stays: of a version that a run published, runs/<id>/weights/<version>, and deletes after a few
    steps, hard links in runs/<id>, for as long as they are needed. Raises ConfigError if it is gone."""
    run = checkpoint.absolute().parent.parent
    if checkpoint.absolute().parent != run / "weights" or not (run / "config.yaml").is_file():
        yield checkpoint
        return
    links = run / f".eval-{os.getpid()}"
    try:
        try:
            hold(checkpoint, links)
        except OSError as error:
            if not (checkpoint / "config.json").is_file():
                raise ConfigError(
                    f"{checkpoint}: the run has deleted this version since (weights.keep). Name a newer one, or "
                    "runs/<id>/best or model-final."
                ) from error
            yield checkpoint  # a folder that we may only read
        else:
            yield links
    finally:
        shutil.rmtree(links, ignore_errors=True)


@contextlib.contextmanager
def gone_after_success(folder: Path) -> Iterator[None]:
    """Remove `folder` and its parent afterwards where they were not there before; an error leaves them."""
    made, made_parent = not folder.exists(), not folder.parent.exists()
    yield
    if made:
        shutil.rmtree(folder, ignore_errors=True)
    if made_parent:
        with contextlib.suppress(OSError):  # another evaluation's folder is in it, or it was never made
            folder.parent.rmdir()


async def evaluate_alone(config: RunConfig, *, prompts: int, samples: int, version: int = 0) -> dict[str, Any]:
    """Start an engine, evaluate, end it; the record. version: how the record names the weights.

    A folder of the run that this made, for the engine's log, goes unless something fails.
    """
    if config.model.path is None:
        raise ConfigError("name the folder of a checkpoint")
    with held(config.model.path) as path, gone_after_success(config.run.folder):
        safe = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
        return await _evaluated(
            safe, str(config.model.path), Plan(version, prompts, samples, safe.rollout.concurrent_groups)
        )


async def _evaluated(config: RunConfig, named: str, plan: Plan) -> dict[str, Any]:
    """As `evaluate_alone`, of a checkpoint that stays. named: how the record names it."""
    assert config.model.path is not None
    task = make_task(config.task.name, config.run.seed, config.task.parameters)
    codec, checkpoint = FileCodec(config.model.path), read_checkpoint(config.model.path)
    check_task(task, codec)
    rollout = config.rollout
    limits = PoolLimits.of(rollout)
    judge = make_judge(task, seed=config.run.seed, parameters=config.task.parameters, limits=limits)
    sampling = Sampling(rollout.temperature, rollout.max_new_tokens, checkpoint.stop_ids)
    try:
        async with evaluation_engine(config, plan.version) as engine:

            async def generate(ids: Any, n: int) -> list[Sample | InvalidAnswer]:
                return await engine.client.generate(ids, n, sampling)

            answers = await engine.during(evaluate(task, judge, codec, generate, plan))
    finally:
        await judge.close()
    if not any(answers.rewards.values()):
        raise ConfigError(f"no answer could be judged: {answers.last_error or 'the task has no prompts'}")
    return result(
        task.name,
        plan,
        answers,
        checkpoint=named,
        seed=config.run.seed,
        temperature=rollout.temperature,
    )
