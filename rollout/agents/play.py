"""Plays the episodes of one group by an agent's own code.

Invariant: an agent's code runs in a thread and an event loop of its own; one that raises, hangs, gives no number or
never calls the model costs its own episode, nothing else, and is counted. An episode may give several trajectories
(rollout/agents/transcript.py), all with its reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

from broker.types import Trajectory
from rollout.agents.endpoint import Endpoint
from rollout.agents.session import Session
from rollout.agents.types import AgentTask
from rollout.client import InvalidAnswer
from rollout.codec import Codec
from rollout.environments.play import at_once
from rollout.environments.turns import Interrupted, Turns
from rollout.sampling import NoEngine
from rollout.tasks.types import Prompt
from rollout.threads import in_thread

GRACE_S = 1.0  # between the end that an agent's loop sets and that of our waiting


class AgentFailed(Exception):
    """An agent raised, was late, gave no finite reward, or called nothing."""


async def play_agents(
    task: AgentTask, prompt: Prompt, samples: int, *, endpoint: Endpoint, turns: Turns, codec: Codec
) -> tuple[Trajectory, ...]:
    """The trajectories of up to `samples` episodes, played at the same time. Raises NoEngine."""
    counters = turns.template.counters

    async def episode() -> tuple[Trajectory, ...]:
        problem = ""
        for _ in range(turns.tries):
            try:
                return await _play(task, prompt, endpoint, turns, codec)
            except Interrupted as error:
                counters.add("episodes_interrupted")
                problem = str(error)
            except (AgentFailed, InvalidAnswer) as error:
                problem = str(error)
                break
        turns.left_out(task.name, problem)
        return ()

    return tuple(trajectory for played in await at_once(episode, samples) for trajectory in played)


async def _play(
    task: AgentTask, prompt: Prompt, endpoint: Endpoint, turns: Turns, codec: Codec
) -> tuple[Trajectory, ...]:
    session = Session(turns, codec, task.agent_calls)
    try:
        with endpoint.serving(session) as key:
            reward = await _reward(task, prompt, endpoint.url, key)
        if session.fault is not None:
            raise session.fault
        made = session.transcript.trajectories(reward)
        if not made:
            raise AgentFailed("the agent made no call")
        return made
    except (AgentFailed, InvalidAnswer, Interrupted, NoEngine) as error:
        turns.lost(session.transcript.tokens)
        raise session.fault or error from None


async def _reward(task: AgentTask, prompt: Prompt, url: str, key: str) -> float:
    agent = _Running(task, prompt, url, key)
    try:
        reward = await in_thread(agent.run, task.agent_timeout_s + GRACE_S)
    except TimeoutError as error:
        raise AgentFailed(f"the agent took longer than {task.agent_timeout_s:g} s") from error
    except Exception as error:  # an agent's code may fail in any way
        raise AgentFailed(f"{type(error).__name__}: {error}") from error
    finally:
        agent.stop()
    if not math.isfinite(reward):
        raise AgentFailed(f"the reward is {reward}")
    return reward


class _Running:
    """An agent's coroutine in an event loop of its own, which `stop` ends from another thread."""

    def __init__(self, task: AgentTask, prompt: Prompt, url: str, key: str) -> None:
        self._task, self._arguments = task, (url, key, prompt)
        self._work: asyncio.Task[float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> float:
        """In its thread, to the end."""
        return asyncio.run(self._bounded())

    def stop(self) -> None:
        """Cancel it if it still runs; what it holds open is closed by its own code."""
        if self._loop is not None and self._work is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._work.cancel)

    async def _bounded(self) -> float:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.ensure_future(self._task.run(*self._arguments))
        async with asyncio.timeout(self._task.agent_timeout_s):
            return float(await self._work)
