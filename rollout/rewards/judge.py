"""Who computes a reward: a thread, a process of its own, or a service.

Invariant: `Judge.reward` ends within a bounded time, with a finite number or with one of the two errors below; what
becomes of the code that hangs or crashes is the judge's matter and never the worker's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Protocol

from rollout.rewards.pool import PoolLimits, ProcessPool, RewardFailed, RewardTimeout, child_environment
from rollout.rewards.service import ServiceJudge
from rollout.tasks import Prompt, Response, Task
from rollout.threads import in_thread


class Judge(Protocol):
    """Computes rewards; safe for any number of tasks of one event loop."""

    async def reward(self, prompt: Prompt, response: Response) -> float:
        """A finite number. Raises RewardFailed, RewardTimeout if it was late."""

    async def close(self) -> None:
        """End what it started."""


class ThreadJudge:
    """For tasks whose rewards are quick and cannot hang: a few comparisons."""

    def __init__(self, task: Task, timeout_s: float) -> None:
        """timeout_s: longest time for one reward; a later one runs on in its thread, which Python cannot end."""
        self._task, self._timeout_s = task, timeout_s

    async def reward(self, prompt: Prompt, response: Response) -> float:
        """See Judge."""
        try:
            reward = float(await in_thread(lambda: self._task.reward(prompt, response), self._timeout_s))
        except TimeoutError as error:
            raise RewardTimeout(f"no reward within {self._timeout_s:g} s") from error
        except Exception as error:  # a task's code may fail in any way; it must not take the worker with it
            raise RewardFailed(f"{type(error).__name__}: {error}") from error
        return finite(reward)

    async def close(self) -> None:
        """Nothing was started."""


class PoolJudge:
    """For every other task: processes with limits of time and memory."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool

    async def reward(self, prompt: Prompt, response: Response) -> float:
        """See Judge."""
        return finite(await self._pool.reward(prompt, response))

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()


def make_judge(task: Task, *, seed: int, parameters: Mapping[str, Any], limits: PoolLimits) -> Judge:
    """The judge that a task asks for: its `service`, `isolated` processes, else a thread.

    seed, parameters: what the task was made of, since each process makes it again.
    """
    service = getattr(task, "service", None)
    if service is not None:
        return ServiceJudge(service)
    if getattr(task, "isolated", False):
        return PoolJudge(ProcessPool(task.name, seed, parameters, limits, child_environment(os.environ)))
    return ThreadJudge(task, limits.timeout_s)


def finite(reward: float) -> float:
    """The reward itself. Raises RewardFailed if it is infinite or not a number."""
    if not math.isfinite(reward):
        raise RewardFailed(f"the reward is {reward}")
    return reward
