"""Tasks: where prompts come from and how responses are rewarded (docs/add-a-task.md)."""

from rollout.tasks.registry import make_task, task_names
from rollout.tasks.types import Prompt, Response, Task

__all__ = ["Prompt", "Response", "Task", "make_task", "task_names"]
