"""`lagrange eval CHECKPOINT --task NAME --samples 8`: one engine, one checkpoint, one task; no Redis, no run.

Invariant: nothing is left of it but the record that it returns, and, if it fails, the engine's log.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.load import ConfigError, validated
from configs.schema import RunConfig
from rollout.checkpoint import read_checkpoint
from rollout.client import InvalidAnswer, Sample, Sampling
from rollout.codec import FileCodec
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


async def evaluate_alone(config: RunConfig, *, prompts: int, samples: int, version: int = 0) -> dict[str, Any]:
    """Start an engine, evaluate, end it; the record. version: how the record names the weights.

    A folder of the run that this made, for the engine's log, goes unless something fails.
    """
    folder = config.run.folder
    made, made_parent = not folder.exists(), not folder.parent.exists()
    if config.model.path is None:
        raise ConfigError("name the folder of a checkpoint")
    task = make_task(config.task.name, config.run.seed, config.task.parameters)
    codec, checkpoint = FileCodec(config.model.path), read_checkpoint(config.model.path)
    check_task(task, codec)
    rollout = config.rollout
    limits = PoolLimits.of(rollout)
    judge = make_judge(task, seed=config.run.seed, parameters=config.task.parameters, limits=limits)
    sampling = Sampling(rollout.temperature, rollout.max_new_tokens, checkpoint.stop_ids)
    plan = Plan(version, prompts, samples, rollout.concurrent_groups)
    try:
        async with evaluation_engine(config, version) as engine:

            async def generate(ids: Any, n: int) -> list[Sample | InvalidAnswer]:
                return await engine.client.generate(ids, n, sampling)

            answers = await engine.during(evaluate(task, judge, codec, generate, plan))
    finally:
        await judge.close()
    if not any(answers.rewards.values()):
        raise ConfigError(f"no answer could be judged: {answers.last_error or 'the task has no prompts'}")
    if made:
        shutil.rmtree(folder, ignore_errors=True)
    if made_parent:
        with contextlib.suppress(OSError):  # another evaluation's folder is in it, or it was never made
            folder.parent.rmdir()
    return result(
        task.name,
        plan,
        answers,
        checkpoint=str(config.model.path),
        seed=config.run.seed,
        temperature=rollout.temperature,
    )
