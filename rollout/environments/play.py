"""Plays the episodes of one group against the engines.

Invariant: every episode that comes out went through `Episode.answered` for each turn; one whose engine, environment or
accounting failed is left out and counted, and the others go on. An episode that runs out of room ends as "length".
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from broker.types import Trajectory
from rollout.client import InvalidAnswer
from rollout.codec import Codec
from rollout.engines import EnginePool
from rollout.environments.episode import Episode
from rollout.environments.types import Environment, EnvironmentTask, Step
from rollout.sampling import Draw, draw_group
from rollout.tasks.types import Prompt
from rollout.threads import in_thread

LOG = structlog.get_logger()


async def play_group(
    task: EnvironmentTask,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    samples: int,
    *,
    pool: EnginePool,
    engine_id: str,
    template: Draw,
    context: int,
    patience_s: float,
    step_s: float,
    codec: Codec,
) -> tuple[Trajectory, ...]:
    """Up to `samples` episodes, at the same time.

    template: how every turn is drawn; its max_new_tokens are for all turns of an episode together.
    step_s: longest time for one step of the environment. Raises NoEngine and Unanswerable, as draw_group.
    """

    sampling, counters = template.sampling, template.counters

    async def turn(ids: tuple[int, ...], routes_start: int, oldest: int, limit: int) -> Draw:
        short = replace(sampling, max_new_tokens=limit)
        draw = replace(template, prompt_ids=ids, sampling=short, at_least=oldest, routes_start=routes_start, slots=[])
        await draw_group(draw, 1, pool, engine_id, patience_s)
        return draw

    async def episode() -> Trajectory | None:
        try:
            environment = task.environment(prompt)
            state = Episode(tuple(prompt_ids)).observed(codec.encode(environment.reset()))
            for _ in range(task.turns):
                asked = state.turn
                limit = min(sampling.max_new_tokens - len(state.ids), context - len(asked.prompt_ids))
                limit -= len(state.pending) if state.turns else 0
                if limit < 1:
                    state = replace(state, finish="length")
                    break
                oldest = state.versions[-1].version if state.versions else template.at_least
                drawn = await turn(asked.prompt_ids, asked.routes_start, oldest, limit)
                if not drawn.samples:
                    raise InvalidAnswer(drawn.last_error or "no answer")
                sample = drawn.samples[0]
                state = state.answered(asked, sample)
                step = await _step(environment, codec.decode(sample.token_ids.tolist()), step_s)
                state = state.observed(() if step.done else codec.encode(step.text), step.reward)
                if step.done:
                    break
            return state.trajectory()
        except (InvalidAnswer, EnvironmentFailed) as error:
            counters.add("episode_failures")
            LOG.warning("an episode is left out", task=task.name, problem=str(error)[:300])
            return None

    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(episode()) for _ in range(samples)]
    done = [one.result() for one in playing]
    return tuple(trajectory for trajectory in done if trajectory is not None)


class EnvironmentFailed(Exception):
    """An environment raised, was late, or gave a reward that is no number."""


async def _step(environment: Environment, text: str, timeout_s: float) -> Step:
    call: Callable[[], Step] = lambda: environment.step(text)  # noqa: E731 (in_thread wants a callable)
    try:
        step = await in_thread(call, timeout_s)
    except TimeoutError as error:
        raise EnvironmentFailed(f"no step within {timeout_s:g} s") from error
    except Exception as error:  # an environment's code may fail in any way
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error
    if not math.isfinite(step.reward):
        raise EnvironmentFailed(f"the reward is {step.reward}")
    return step
