"""Draws the next turn of an episode.

Invariant: an episode keeps what the configuration asks of a sample: its versions never fall, it spans at most
rollout.max_versions of them, and one that an update interrupted goes on, is played again from its start, or is left
out, as rollout.interrupted says. What is thrown away is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from rollout.client import InvalidAnswer
from rollout.engines import EnginePool
from rollout.environments.episode import Episode
from rollout.sampling import Draw, draw_group, told_on

LOG = structlog.get_logger()


class Interrupted(Exception):
    """This episode cannot go on: an update came, or it would span too many versions."""


@dataclass(frozen=True, slots=True)
class Turns:
    """How turns of one group's episodes are drawn.

    engine_id: of the admission; later turns prefer the engine of the turn before. template: its sampling, counters and
    rules; what is lost is added to it. context: the model's longest sequence. patience_s: longest wait for an engine,
    in seconds.
    """

    pool: EnginePool
    engine_id: str
    template: Draw
    context: int
    patience_s: float

    @property
    def tries(self) -> int:
        """How often an episode is played: an interrupted one again, unless it is to be left out."""
        return 1 if self.template.interrupted == "drop" else self.template.tries

    async def next(self, episode: Episode, limit: int) -> Episode:
        """The episode with its next turn, of at most `limit` tokens.

        Raises Interrupted, InvalidAnswer, and NoEngine and Unanswerable as draw_group does.
        """
        asked, begun, template = episode.turn, episode.versions, self.template
        draw = replace(
            template,
            prompt_ids=asked.prompt_ids,
            sampling=replace(template.sampling, max_new_tokens=limit),
            at_least=begun[-1].version if begun else template.at_least,
            routes_start=asked.routes_start,
            interrupted="continue" if template.interrupted == "continue" else "drop",
            max_versions=max(1, template.max_versions - max(0, len(begun) - 1)),
            slots=[],
            tokens_lost=0,
        )
        try:
            await draw_group(draw, 1, self.pool, episode.engine_id or self.engine_id, self.patience_s)
        finally:
            template.tokens_lost += draw.tokens_lost
            template.last_error = draw.last_error or template.last_error
        if draw.interruptions:
            raise Interrupted(draw.last_error)
        if not draw.samples:
            raise InvalidAnswer(draw.last_error or "no answer")
        after = replace(episode.answered(asked, draw.samples[0]), engine_id=draw.engine_id)
        if len(after.versions) > template.max_versions:
            self.lost(sum(after.mask) - sum(episode.mask))
            raise Interrupted(f"it would span more than {template.max_versions} versions")
        return after

    def left_out(self, task: str, problem: str) -> None:
        """An episode of this task is given up: counted, logged, and told to the group, which may fail for it."""
        problem = told_on(problem)
        self.template.last_error = f"an episode failed: {problem}"
        if episodes := self.template.counters.fail("episode_failures", problem):
            LOG.warning("episodes are left out", task=task, episodes=episodes, newest=problem)

    def lost(self, tokens: int) -> None:
        """Tokens of an episode that is thrown away."""
        self.template.tokens_lost += tokens
        self.template.counters.add("discarded_tokens", tokens)
