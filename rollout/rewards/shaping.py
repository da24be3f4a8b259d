"""What is added to a task's reward, by configuration (`task.shaping`). Pure.

Invariant: with the defaults a reward stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from configs.schema import ShapingSection
from rollout.tasks.types import Response


@dataclass(frozen=True, slots=True)
class Shaping:
    """Compiled `task.shaping`; see configs/schema.py for the meaning of each number."""

    length_limit: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    truncated_reward: float | None = None
    format_pattern: re.Pattern[str] | None = None
    format_reward: float = 0.0

    @classmethod
    def of(cls, section: ShapingSection, max_new_tokens: int) -> Shaping:
        """As configured. max_new_tokens: the response limit, where the penalty is full."""
        pattern = re.compile(section.format_pattern, re.DOTALL) if section.format_pattern else None
        limit = section.length_limit or max_new_tokens
        return cls(
            length_limit=limit,
            overlong_buffer=section.overlong_buffer,
            overlong_penalty=section.overlong_penalty,
            truncated_reward=section.truncated_reward,
            format_pattern=pattern,
            format_reward=section.format_reward,
        )

    def shaped(self, reward: float, response: Response) -> float:
        """The reward that is trained on."""
        if self.truncated_reward is not None and response.finish != "stop":
            reward = self.truncated_reward
        if self.format_pattern is not None and self.format_pattern.search(response.text):
            reward += self.format_reward
        penalty = overlong(len(response.ids), self.length_limit, self.overlong_buffer)
        return reward - self.overlong_penalty * penalty


def overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, 0 to 1 (arXiv 2503.14476, equation 13, as a positive number).

    0 up to limit - buffer tokens, rising linearly to 1 at the limit, and 1 beyond it; always 0 for buffer = 0.
    """
    if buffer <= 0:
        return 0.0
    return min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)
