"""Plays the episodes of one group against the engines.

Invariant: every episode that comes out went through `Episode.answered` for each turn; one whose engine, environment or
accounting failed is left out and counted, and the others go on. An episode that runs out of room ends as "length"; one
that an update interrupted is played again from its start, or goes on, or is left out (rollout/environments/turns.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from broker.types import Trajectory
from rollout.client import InvalidAnswer
from rollout.codec import Codec
from rollout.environments.episode import Episode
from rollout.environments.turns import Interrupted, Turns
from rollout.environments.types import Environment, EnvironmentTask
from rollout.sampling import NoEngine, Unanswerable
from rollout.tasks.types import Prompt
from rollout.threads import in_thread

T = TypeVar("T")


class EnvironmentFailed(Exception):
    """An environment raised, was late, or gave a reward that is no number."""


async def play_group(
    task: EnvironmentTask,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    samples: int,
    *,
    turns: Turns,
    step_s: float,
    codec: Codec,
) -> tuple[Trajectory, ...]:
    """Up to `samples` episodes, at the same time.

    turns: how they are drawn; rollout.max_new_tokens is for all turns of an episode together. step_s: longest time for
    one step of the environment. Raises NoEngine and Unanswerable, as draw_group.
    """
    counters = turns.template.counters

    async def episode() -> Trajectory | None:
        problem = ""
        for _ in range(turns.tries):
            try:
                return await _play(task, prompt, prompt_ids, turns, step_s, codec)
            except Interrupted as error:
                counters.add("episodes_interrupted")
                problem = str(error)
            except (InvalidAnswer, EnvironmentFailed) as error:
                problem = str(error)
                break
        turns.left_out(task.name, problem)
        return None

    done = await at_once(episode, samples)
    return tuple(trajectory for trajectory in done if trajectory is not None)


async def at_once(play: Callable[[], Coroutine[Any, Any, T]], times: int) -> list[T]:
    """What `times` of `play()` give; the first NoEngine or Unanswerable ends all of them and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(play()) for _ in range(times)]
    except* (NoEngine, Unanswerable) as errors:
        raise errors.exceptions[0] from None
    return [done.result() for done in playing]


async def _play(
    task: EnvironmentTask, prompt: Prompt, prompt_ids: Sequence[int], turns: Turns, step_s: float, codec: Codec
) -> Trajectory:
    state = Episode(tuple(prompt_ids))
    try:
        environment, first = await _within(lambda: _started(task, prompt), step_s)
        state = state.observed(codec.encode(first))
        for _ in range(task.turns):
            limit = _room(state, turns)
            if limit < 1:
                state = replace(state, finish="length")
                break
            begun = len(state.ids) + (len(state.pending) if state.turns else 0)
            state = await turns.next(state, limit)
            step = await _within(partial(environment.step, codec.decode(state.ids[begun:])), step_s)
            if not math.isfinite(step.reward):
                raise EnvironmentFailed(f"the reward is {step.reward}")
            state = state.observed(() if step.done else codec.encode(step.text), step.reward)
            if step.done:
                break
        return state.trajectory()
    except (Interrupted, InvalidAnswer, EnvironmentFailed):
        turns.lost(sum(state.mask))
        raise


def _room(state: Episode, turns: Turns) -> int:
    """Tokens that the next turn may have: what is left of the response limit, and of the context."""
    heard = len(state.pending) if state.turns else 0
    left = turns.template.sampling.max_new_tokens - len(state.ids) - heard
    return min(left, turns.context - len(state.turn.prompt_ids))


def _started(task: EnvironmentTask, prompt: Prompt) -> tuple[Environment, str]:
    environment = task.environment(prompt)
    return environment, environment.reset()


async def _within(call: Callable[[], T], timeout_s: float) -> T:
    """What an environment answers. Raises EnvironmentFailed: its code may fail in any way, and be late."""
    try:
        return await in_thread(call, timeout_s)
    except TimeoutError as error:
        raise EnvironmentFailed(f"no answer within {timeout_s:g} s") from error
    except Exception as error:
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error
