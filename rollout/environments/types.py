"""What an environment gives and gets. Without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rollout.tasks.types import Prompt, Task


@dataclass(frozen=True, slots=True)
class Step:
    """What follows a turn of the model. text: what it reads next, with the special tokens of its template in it.

    reward: of this turn; an episode's reward is the sum. done: the episode is over, and text is not shown.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode; made anew for every sample."""

    def reset(self) -> str:
        """Text that follows the prompt before the first turn; "" for none. The same for all samples of a group."""

    def step(self, text: str) -> Step:
        """The model said `text` (decoded, without special tokens)."""


@runtime_checkable
class EnvironmentTask(Task, Protocol):
    """A task of several turns. Its `reward` is not used: the environment's rewards add up."""

    @property
    def turns(self) -> int:
        """Most turns of the model in one episode."""

    def environment(self, prompt: Prompt) -> Environment:
        """A new episode of a prompt."""
