"""Live curriculum: prompts that the policy nearly always or nearly never solves are passed over (`task.curriculum`).

Invariant: which prompt an index stands for never changes; a prompt that is passed over ends as a filtered group without
tokens, counted, and some of them are drawn all the same, so that none is lost for good as the policy learns and no run
comes to a stand. All workers of a run share what is known, in Redis, across restarts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np

from configs.schema import CurriculumSection


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
