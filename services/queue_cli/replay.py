"""Computes a dumped group again on a CPU: rewards, advantages, log-ratios and the loss.

Invariant: the same functions as in a run are used (task, advantage, packing, loss), so a difference is one of data,
model or release. Without a model the policy is taken to be the engine's: log-ratios are 0 and the loss is that of a
first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from broker.types import Float32Array, Group, Trajectory
from configs import ConfigError, RunConfig


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. recomputed: None where the task cannot be asked (why: its reason). log_ratio: mean and largest
    |log pi - log mu| over trainable tokens."""

    reward: float
    recomputed: float | None
    why: str
    advantage: float
    tokens: int
    lag: int
    mean_log_ratio: float
    largest_log_ratio: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """rows: one for each sample. loss: of a step that has this group alone. difference: the first one, or ""."""

    rows: tuple[Row, ...]
    loss: float
    loss_name: str
    difference: str


def replay(
    group: Group, config: RunConfig, version: int, *, model: Path | None = None, tolerance: float = 1e-3
) -> Replayed:
    """version: of the trainer, for lags. model: folder of a Hugging Face checkpoint whose log-probs are pi; dense
    forward passes without routing replay. tolerance: of |log-ratio|, above which a token counts as a difference.
    """
    from trainer.advantages import group_advantages  # imports torch
    from trainer.losses.catalogue import loss_settings

    settings = loss_settings(config)
    rewards = [t.reward for t in group.trajectories]
    advantages = [float(a) for a in group_advantages(rewards, settings.advantage)]
    policy = [t.log_probs for t in group.trajectories]
    if model is not None:
        policy = model_log_probs(group.trajectories, model, config)
    rows, difference = [], ""
    for index, (t, own, advantage) in enumerate(zip(group.trajectories, policy, advantages, strict=True)):
        recomputed, why = _reward(group, t, config)
        ratio = np.abs(own - t.log_probs)[t.loss_mask]
        row = Row(
            reward=t.reward,
            recomputed=recomputed,
            why=why,
            advantage=advantage,
            tokens=len(ratio),
            lag=0 if t.oldest_version is None else version - t.oldest_version,
            mean_log_ratio=float(ratio.mean()) if len(ratio) else 0.0,
            largest_log_ratio=float(ratio.max(initial=0.0)),
        )
        rows.append(row)
        difference = difference or _difference(index, row, t, own, tolerance)
    return Replayed(tuple(rows), _loss(group, advantages, policy, config), config.trainer.loss.name, difference)


def model_log_probs(trajectories: Sequence[Trajectory], folder: Path, config: RunConfig) -> list[Float32Array]:
    """For each, float32 [response]: log-probs under a checkpoint, at the run's temperature. Raises ConfigError."""
    import torch

    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError("replay --model needs the package transformers: pip install transformers") from error
    disable_progress_bar()
    loaded, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for t in trajectories:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        with torch.no_grad():
            logits = loaded(ids[None]).logits[0, :-1] / config.rollout.temperature
        scores = torch.log_softmax(logits.float(), -1).gather(1, ids[1:, None])[:, 0]
        found.append(np.asarray(scores[len(t.prompt_ids) - 1 :].numpy(), np.float32))
    return found


def _difference(index: int, row: Row, t: Trajectory, own: Float32Array, tolerance: float) -> str:
    if row.recomputed is not None and row.recomputed != row.reward:
        return f"sample {index}: the reward was recorded as {row.reward:g} and is now {row.recomputed:g}"
    beyond = np.flatnonzero((np.abs(own - t.log_probs) > tolerance) & t.loss_mask)
    if not len(beyond):
        return ""
    at = int(beyond[0])
    return (
        f"sample {index}, response token {at} (id {int(t.response_ids[at])}): the engine's log-prob is "
        f"{float(t.log_probs[at]):.6f}, the model's {float(own[at]):.6f}"
    )


def _reward(group: Group, t: Trajectory, config: RunConfig) -> tuple[float | None, str]:
    from rollout.codec import FileCodec
    from rollout.tasks import Response
    from rollout.tasks.registry import make_task

    try:
        task = make_task(group.task, config.run.seed, config.task.parameters)
        prompt = task.prompt(group.prompt_index)
        ids = tuple(int(i) for i in t.response_ids)
        text = FileCodec(config.model.path).decode(ids) if config.model.path is not None else ""
        return float(task.reward(prompt, Response(text=text, ids=ids, finish=t.finish))), ""
    except Exception as error:  # a task is foreign code, and a dump may come from another machine
        return None, f"{type(error).__name__}: {error}"


def _loss(group: Group, advantages: Sequence[float], policy: Sequence[Float32Array], config: RunConfig) -> float:
    import torch

    from trainer.batch import Sample, pack
    from trainer.losses.catalogue import loss_settings
    from trainer.losses.step import loss_function, prepare

    settings = loss_settings(config)
    samples = [
        Sample(t, np.full(len(t.response_ids), value, np.float32))
        for t, value in zip(group.trajectories, advantages, strict=True)
    ]
    own = [
        replace(sample, trajectory=structs.replace(sample.trajectory, log_probs=found))
        for sample, found in zip(samples, policy, strict=True)
    ]
    batch = pack(samples, route_shape=None)
    log_probs = pack(own, route_shape=None).behaviour_log_probs
    context = prepare(settings, [batch], [log_probs])
    loss, _ = loss_function(settings, context)(batch, log_probs, torch.zeros_like(log_probs))
    return float(loss) + 0.0  # no -0, which is what advantages that cancel out may add up to
