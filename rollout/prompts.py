"""The prompts of a task as a worker takes them: by index, with their token ids.

Invariant: whatever a task's code does, `of` returns a prompt or raises BadPrompt or PastTheEnd. A data set counts as
ended only where LOOK_AHEAD prompts in a row are missing: a slip in a task's code, an IndexError too, ends no run.
"""

from __future__ import annotations

from rollout.codec import Codec
from rollout.tasks import Prompt, Task
from rollout.tasks.prepare import encode_prompt

LOOK_AHEAD = 16


class BadPrompt(Exception):
    """A prompt that cannot be made or sent; trying again would not help."""


class PastTheEnd(Exception):
    """The data set ends before this prompt."""


class Prompts:
    """The prompts of one task. failures: those that could not be had since one could."""

    def __init__(self, task: Task, codec: Codec) -> None:
        self._task, self._codec = task, codec
        self.failures = 0

    def of(self, index: int) -> tuple[Prompt, tuple[int, ...]]:
        """A prompt and its token ids."""
        try:
            prompt = self._task.prompt(index)
            ids = encode_prompt(prompt, self._codec)
        except Exception as error:  # a task's code may fail in any way; it must not take the worker with it
            self.failures += 1
            if isinstance(error, IndexError) and all(self._missing(index + i) for i in range(LOOK_AHEAD)):
                raise PastTheEnd(str(error)) from error
            raise BadPrompt(f"prompt {index} of {self._task.name}: {type(error).__name__}: {error}") from error
        self.failures = 0
        return prompt, tuple(ids)

    def _missing(self, index: int) -> bool:
        try:
            self._task.prompt(index)
        except Exception as error:
            return isinstance(error, IndexError)
        return False
