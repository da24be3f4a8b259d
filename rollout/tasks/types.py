"""What a task gives and gets. Without I/O.

Invariant: a prompt has exactly one of text, ids and messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. text: for the model's tokenizer; ids: tokens as they are; messages: for its chat template.

    metadata: for the reward; plain data (numbers, strings, lists, dicts) if the task is `isolated`. source: the data
    set it comes from, which names its metrics.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if bool(self.text) + bool(self.ids) + bool(self.messages) != 1:
            raise ValueError("a prompt needs exactly one of text, ids and messages")


@dataclass(frozen=True, slots=True)
class Response:
    """One response. text: without special tokens. ids: all sampled tokens. finish: "stop" or "length"."""

    text: str
    ids: tuple[int, ...]
    finish: str


class NoReward(TypeError):
    """This task's rewards are no function of a response: its service, environment or agent gives them."""


@runtime_checkable
class Task(Protocol):
    """Where prompts come from and how responses are rewarded.

    A task may also have `isolated = True`: its rewards are then computed in processes of their own, which are killed
    when they take too long or too much memory (docs/rewards.md). And `environment`, for several turns
    (rollout/environments), `run`, for an agent (rollout/agents), or `service`, if its rewards come from an HTTP service
    (rollout/rewards/service.py).
    """

    @property
    def name(self) -> str:
        """The name under which it is registered."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of an index, 0, 1, 2, ...; the same each time. Raises IndexError when there are no more:
        the run then ends once what it has is trained."""

    def reward(self, prompt: Prompt, response: Response) -> float:
        """A finite number, larger is better; called in a thread, several at a time, within rollout.reward_timeout_s."""
