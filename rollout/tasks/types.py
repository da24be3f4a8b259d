"""What a task gives and gets. Without I/O.

Invariant: a prompt has exactly one of text and ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. text: for the model's tokenizer; ids: tokens as they are. metadata: for the reward."""

    text: str = ""
    ids: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.ids):
            raise ValueError("a prompt needs exactly one of text and ids")


@dataclass(frozen=True, slots=True)
class Response:
    """One response. text: without special tokens. ids: all sampled tokens. finish: "stop" or "length"."""

    text: str
    ids: tuple[int, ...]
    finish: str


@runtime_checkable
class Task(Protocol):
    """Where prompts come from and how responses are rewarded."""

    @property
    def name(self) -> str:
        """The name under which it is registered."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of an index, 0, 1, 2, ...; the same each time. Raises IndexError when there are no more."""

    def reward(self, prompt: Prompt, response: Response) -> float:
        """A finite number, larger is better; called in a thread, several at a time, within rollout.reward_timeout_s."""
