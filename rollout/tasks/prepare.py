"""From a task's prompt to the tokens that an engine gets.

Invariant: messages are rendered by the model's own chat template, text and ids are taken as they are.
"""

from __future__ import annotations

from configs.load import ConfigError
from rollout.agents.types import AgentTask
from rollout.codec import Codec
from rollout.tasks.types import Prompt, Task


def encode_prompt(prompt: Prompt, codec: Codec) -> tuple[int, ...]:
    """Token ids of a prompt. Raises ChatError if the model cannot take messages."""
    if prompt.messages:
        return codec.encode(codec.chat(prompt.messages))
    return prompt.ids or codec.encode(prompt.text)


def try_prompt(task: Task, codec: Codec) -> None:
    """Make the first prompt, so that what is wrong with all of them is said at the start. Raises ConfigError."""
    try:
        encode_prompt(task.prompt(0), codec)
        if isinstance(task, AgentTask):
            codec.chat(({"role": "user", "content": "?"},))
    except Exception as error:  # a task's code may fail in any way
        raise ConfigError(f"task {task.name!r}: its first prompt cannot be made: {error}") from error
