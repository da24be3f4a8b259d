"""What an agent is. Without I/O."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rollout.tasks.types import Prompt, Task


@runtime_checkable
class AgentTask(Task, Protocol):
    """A task that drives the model itself, by calls of an OpenAI-compatible endpoint. Its `reward` is not used."""

    @property
    def agent_timeout_s(self) -> float:
        """Longest time for one episode, in seconds."""

    @property
    def agent_calls(self) -> int:
        """Most calls of the model in one episode."""

    async def run(self, base_url: str, api_key: str, prompt: Prompt) -> float:
        """Play one episode and give its reward, a finite number.

        base_url, api_key: as of an OpenAI client; the key is this episode's and ends with it. Called in an event loop
        of its own in a thread of its own, so that code that blocks holds up nothing else.
        """
