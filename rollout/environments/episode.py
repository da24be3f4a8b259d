"""Token-in, token-out accounting of an episode. Pure.

Invariant: the engine's tokens are never decoded and encoded again: turn k + 1 is asked for with exactly the ids that
turn k left, followed by the environment's. The trajectory's response holds both; the environment's tokens are masked,
have log-prob 0 and the version of the turn that precedes them. Routes are asked for from the first position that has
none (`routes_start`), so what is fetched grows linearly with the episode, and each row is of the forward pass that
produced the log-prob after it.

With a prompt of p tokens and s tokens so far, positions 0 .. p + s - 2 have routes after a turn: its last token was
sampled but not fed. The next turn's request is p + s + e tokens long (e of the environment), with routes from
p + s - 1, and gives e + b rows for b new tokens: again all but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from broker.types import Trajectory, VersionRun
from rollout.client import InvalidAnswer, Sample
from rollout.continuation import join_runs


class PrefixBroken(InvalidAnswer):
    """A turn does not continue the tokens that are there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the next request needs: all ids so far, and the first position whose routes are missing."""

    prompt_ids: tuple[int, ...]
    routes_start: int


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """prompt_ids: of the group's prompt. The rest covers the response so far, turns and environment tokens together.

    pending: environment tokens that no turn has read yet; they are dropped if none does. engine_id: of the last turn.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    mask: tuple[bool, ...] = ()
    versions: tuple[VersionRun, ...] = ()
    routes: tuple[np.ndarray, ...] = ()
    rows: int = 0
    pending: tuple[int, ...] = ()
    finish: str = "stop"
    turns: int = 0
    reward: float = 0.0
    engine_id: str = ""

    @property
    def turn(self) -> Turn:
        """The request of the next turn."""
        ids = (*self.prompt_ids, *self.ids, *self.pending)
        return Turn(ids, len(self.prompt_ids) + len(self.ids) - 1 if self.turns else 0)

    def observed(self, ids: Sequence[int], reward: float = 0.0) -> Episode:
        """The environment's tokens follow. reward: of the turn before them."""
        return replace(self, pending=(*self.pending, *map(int, ids)), reward=self.reward + reward)

    def answered(self, asked: Turn, sample: Sample) -> Episode:
        """The model's turn follows. asked: the request it answers. Raises PrefixBroken if that is not this episode's.

        A version older than that of an earlier turn is refused as InvalidAnswer, as by check_trajectory.
        """
        if asked != self.turn:
            raise PrefixBroken(f"turn {self.turns + 1} was asked for with other tokens than turn {self.turns} left")
        if not len(sample.token_ids):
            raise InvalidAnswer("a turn without tokens")
        if self.versions and sample.versions[0].version < self.versions[-1].version:
            raise InvalidAnswer(
                f"turn {self.turns + 1} is of version {sample.versions[0].version}, older than what it continues"
            )
        rows = self._rows(asked, sample)
        heard = len(self.pending) if self.turns else 0
        if not self.turns and self.pending:  # what reset() said is part of the prompt, not of the response
            return replace(self, prompt_ids=asked.prompt_ids, pending=()).answered(asked, sample)
        return replace(
            self,
            ids=(*self.ids, *self.pending, *sample.token_ids.tolist()),
            log_probs=(*self.log_probs, *[0.0] * heard, *sample.log_probs.tolist()),
            mask=(*self.mask, *[False] * heard, *[True] * len(sample.token_ids)),
            versions=join_runs(self.versions, sample.versions, heard),
            routes=self.routes if sample.routes is None else (*self.routes, sample.routes),
            rows=self.rows + rows,
            pending=(),
            finish=sample.finish,
            turns=self.turns + 1,
        )

    def trajectory(self) -> Trajectory:
        """The whole episode. Raises InvalidAnswer if it has no turn or routes are missing somewhere."""
        if not self.turns:
            raise InvalidAnswer("an episode without a turn")
        routes = np.concatenate(self.routes) if self.routes else None
        if routes is not None and len(routes) != len(self.prompt_ids) + len(self.ids) - 1:
            raise InvalidAnswer(f"{len(routes)} rows of routes for {len(self.prompt_ids) + len(self.ids)} tokens")
        return Trajectory(
            prompt_ids=np.asarray(self.prompt_ids, np.int32),
            response_ids=np.asarray(self.ids, np.int32),
            log_probs=np.asarray(self.log_probs, np.float32),
            loss_mask=np.asarray(self.mask, np.bool_),
            versions=self.versions,
            reward=self.reward,
            finish="length" if self.finish == "abort" else self.finish,
            routes=routes,
        )

    def _rows(self, asked: Turn, sample: Sample) -> int:
        if sample.routes is None:
            return 0
        expected = len(asked.prompt_ids) + len(sample.token_ids) - 1 - asked.routes_start
        if sample.routes_start != asked.routes_start or len(sample.routes) != expected:
            raise InvalidAnswer(
                f"routes of {len(sample.routes)} positions from {sample.routes_start}, expected {expected} from "
                f"{asked.routes_start}"
            )
        return len(sample.routes)
