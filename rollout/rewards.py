"""From samples to trajectories: the task's reward, under a time limit.

Invariant: a reward that is late, raises or is not a finite number costs its own sample, nothing else, and is counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import structlog

from broker.types import Trajectory
from rollout.client import Sample
from rollout.codec import Codec
from rollout.counters import Counters
from rollout.tasks import Prompt, Response, Task
from rollout.threads import in_thread

LOG = structlog.get_logger()


async def rewarded(
    task: Task,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    samples: Sequence[Sample],
    *,
    codec: Codec,
    timeout_s: float,
    counters: Counters,
) -> tuple[Trajectory, ...]:
    """The trajectories of those samples that got a reward. timeout_s: longest time for one reward, in seconds."""
    responses = [
        Response(text=codec.decode(s.token_ids.tolist()), ids=tuple(s.token_ids.tolist()), finish=s.finish)
        for s in samples
    ]
    rewards = await asyncio.gather(*(_reward(task, prompt, response, timeout_s, counters) for response in responses))
    return tuple(
        _trajectory(prompt_ids, sample, reward)
        for sample, reward in zip(samples, rewards, strict=True)
        if reward is not None
    )


async def _reward(task: Task, prompt: Prompt, response: Response, timeout_s: float, counters: Counters) -> float | None:
    try:
        reward = float(await in_thread(lambda: task.reward(prompt, response), timeout_s))
        if math.isfinite(reward):
            return reward
        problem = f"the reward is {reward}"
    except TimeoutError:
        problem = f"no reward within {timeout_s:g} s"
        counters.add("reward_timeouts")
    except Exception as error:  # a task's code may fail in any way; it must not take the worker with it
        problem = f"{type(error).__name__}: {error}"
    counters.add("reward_failures")
    LOG.warning("a sample got no reward", task=task.name, problem=problem)
    return None


def _trajectory(prompt_ids: Sequence[int], sample: Sample, reward: float) -> Trajectory:
    return Trajectory(
        prompt_ids=np.asarray(prompt_ids, np.int32),
        response_ids=sample.token_ids,
        log_probs=sample.log_probs,
        loss_mask=np.ones(len(sample.token_ids), np.bool_),
        versions=sample.versions,
        reward=reward,
        finish="length" if sample.finish == "abort" else sample.finish,  # aborted after its last token
        routes=sample.routes,
    )
