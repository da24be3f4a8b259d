"""Live curriculum: prompts that the policy nearly always or nearly never solves are passed over (`task.curriculum`).

Invariant: which prompt an index stands for never changes; a prompt that is passed over ends as a filtered group without
tokens, counted, and some of them are drawn all the same, so that none is lost for good as the policy learns and no run
comes to a stand. All workers of a run share what is known, in Redis, across restarts.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Sequence
from functools import partial

import numpy as np

from broker.errors import BrokerError
from configs.schema import CurriculumSection
from rollout.ports import RolloutBroker
from rollout.threads import in_thread


def prompt_name(prompt_ids: Sequence[int]) -> str:
    """By which a prompt is known when it comes again: a digest of its token ids."""
    return hashlib.blake2b(np.asarray(prompt_ids, "<i4").tobytes(), digest_size=12).hexdigest()


def wanted(settings: CurriculumSection, passes: float, samples: float, draw: float) -> bool:
    """Whether a prompt is to be sampled. passes of samples: what is known; draw: uniform in [0, 1)."""
    if samples <= 0:
        return True
    return settings.low <= passes / samples <= settings.high or draw < settings.again


def draw_of(seed: int, prompt_index: int) -> float:
    """The random number of a prompt's index, the same on every worker."""
    return random.Random(f"curriculum/{seed}/{prompt_index}").random()


def passes_of(settings: CurriculumSection, rewards: Sequence[float]) -> int:
    """How many samples passed."""
    return sum(reward >= settings.pass_reward for reward in rewards)


class Curriculum:
    """The curriculum of one worker. While Redis is away it wants every prompt and learns nothing."""

    def __init__(self, settings: CurriculumSection | None, seed: int, broker: RolloutBroker, timeout_s: float) -> None:
        """settings: None wants every prompt. seed: of the run. timeout_s: longest wait for Redis, in seconds."""
        self._settings, self._seed, self._broker, self._timeout_s = settings, seed, broker, timeout_s

    async def wants(self, prompt_ids: Sequence[int], index: int) -> bool:
        """Whether the prompt of an index is to be sampled."""
        if self._settings is None:
            return True
        with contextlib.suppress(BrokerError, TimeoutError):
            ask = partial(self._broker.pass_rate, prompt_name(prompt_ids))
            return wanted(self._settings, *await in_thread(ask, self._timeout_s), draw_of(self._seed, index))
        return True

    async def learns(self, prompt_ids: Sequence[int], rewards: Sequence[float]) -> None:
        """What became of a prompt's samples."""
        if self._settings is None:
            return
        passes = passes_of(self._settings, rewards)
        tell = partial(self._broker.pass_rate, prompt_name(prompt_ids), passes, len(rewards), self._settings.memory)
        with contextlib.suppress(BrokerError, TimeoutError):
            await in_thread(tell, self._timeout_s)
