"""From samples to trajectories: the judge's reward, shaped as configured.

Invariant: a reward that is late, raises or is not a finite number costs its own sample, nothing else, and is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import structlog

from broker.types import Trajectory
from rollout.client import Sample
from rollout.codec import Codec
from rollout.rewards.judge import Judge
from rollout.rewards.pool import RewardFailed, RewardTimeout
from rollout.rewards.shaping import Shaping
from rollout.sampling import Draw, told_on
from rollout.tasks import Prompt, Response

LOG = structlog.get_logger()


async def rewarded(
    judge: Judge, prompt: Prompt, draw: Draw, *, codec: Codec, shaping: Shaping | None = None, name: str = ""
) -> tuple[Trajectory, ...]:
    """The trajectories of those samples of `draw` that got a reward; its last_error tells why another got none.

    name: of the task, for the log.
    """
    shape, samples = shaping or Shaping(), draw.samples
    responses = [
        Response(text=codec.decode(s.token_ids.tolist()), ids=tuple(s.token_ids.tolist()), finish=s.finish)
        for s in samples
    ]
    rewards = await asyncio.gather(*(_reward(judge, prompt, one, shape, draw, name) for one in responses))
    return tuple(
        _trajectory(draw.prompt_ids, sample, reward)
        for sample, reward in zip(samples, rewards, strict=True)
        if reward is not None
    )


async def _reward(
    judge: Judge, prompt: Prompt, response: Response, shape: Shaping, draw: Draw, name: str
) -> float | None:
    counters = draw.counters
    try:
        reward = await judge.reward(prompt, response)
    except RewardFailed as error:
        if isinstance(error, RewardTimeout):
            counters.add("reward_timeouts")
        problem = told_on(error)
        draw.last_error = f"a reward failed: {problem}"
        if samples := counters.fail("reward_failures", problem):
            LOG.warning("samples got no reward", task=name, samples=samples, newest=problem)
        return None
    if prompt.source:  # the mean reward of a source is the first over the second
        counters.add(f"source_{prompt.source}_reward", reward)
        counters.add(f"source_{prompt.source}_samples")
    return shape.shaped(reward, response)


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
