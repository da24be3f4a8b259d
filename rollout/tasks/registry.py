"""The registry of tasks: how a name becomes a task.

Invariant: a task is a pure function of (seed, parameters, prompt index): every worker, and the same worker after a
restart, gives the same prompt for an index. Built-in names win over those of installed packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from configs.load import ConfigError
from rollout.tasks.digits import Copy, MaxDigit, Reverse
from rollout.tasks.parameters import check_parameters
from rollout.tasks.types import Task

ENTRY_POINTS = "lagrange.tasks"


def _lazy(module: str, attribute: str, /, **fixed: Any) -> Callable[..., Task]:
    """A factory whose module is imported when it is used: most runs need one task."""

    def make(**parameters: Any) -> Task:
        factory: Callable[..., Task] = getattr(import_module(module), attribute)
        check_parameters(factory, parameters)
        return partial(factory, **fixed)(**parameters)

    return make


DATA_SET = "rollout.tasks.data_set"
BUILT_IN: Mapping[str, Callable[..., Task]] = {
    "max-digit": MaxDigit,
    "reverse": Reverse,
    "copy": Copy,
    "math-jsonl": _lazy(DATA_SET, "Mathematics"),
    # As published; `path` names the file. Their fields are found by themselves (rollout/tasks/source.py).
    "dapo-math-17k": _lazy(DATA_SET, "Mathematics", name="dapo-math-17k", instruction=""),
    "gsm8k": _lazy(DATA_SET, "Mathematics", name="gsm8k"),
    "math": _lazy(DATA_SET, "Mathematics", name="math"),
    "aime24": _lazy(DATA_SET, "Mathematics", name="aime24"),
    "choice-jsonl": _lazy(DATA_SET, "MultipleChoice"),
    "exact-jsonl": _lazy(DATA_SET, "Exact"),
    "function-jsonl": _lazy(DATA_SET, "Function"),
    "code-jsonl": _lazy(DATA_SET, "Programs"),
    "service-jsonl": _lazy(DATA_SET, "ServiceTask"),
    "agent-jsonl": _lazy("rollout.agents.task", "AgentRows"),
    "reasoning-gym": _lazy("rollout.tasks.reasoning", "ReasoningGym"),
    "guess-number": _lazy("rollout.environments.games", "GuessNumber"),
    "calculator": _lazy("rollout.environments.games", "Calculator"),
}


def task_names() -> tuple[str, ...]:
    """Names that `make_task` knows: the built-in ones and those of installed packages."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def make_task(name: str, seed: int, parameters: Mapping[str, Any] | None = None) -> Task:
    """The task `name`. seed: of the run. parameters: keyword arguments of its factory (`task.parameters`).

    A package adds a task by an entry point of group "lagrange.tasks" that names a factory (seed, **parameters) -> Task.
    Raises ConfigError if there is no such task, its package does not import, or it refuses its parameters.
    """
    factory = BUILT_IN.get(name) or _installed(name)
    try:
        check_parameters(factory, parameters or {})
        task = factory(seed=seed, **(parameters or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"task.parameters of {name!r}: {str(error).rstrip('.')}. Look up its parameters in docs/add-a-task.md."
        ) from error
    if not isinstance(task, Task):
        raise ConfigError(f"task.name: {name!r} gives {type(task).__name__}, which lacks name, prompt or reward")
    return task


def _installed(name: str) -> Callable[..., Task]:
    points = tuple(entry_points(group=ENTRY_POINTS, name=name))
    if not points:
        close = get_close_matches(name, task_names(), 1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"task.name: there is no task {name!r}, only {', '.join(task_names())}.{meant} One of another package is "
            "there once that package is installed beside Lagrange; docs/add-a-task.md says how to add one."
        )
    try:
        factory: Callable[..., Task] = next(iter(points)).load()
    except Exception as error:  # a package's own import may fail in any way
        raise ConfigError(f"task.name: {name!r} does not import: {type(error).__name__}: {error}") from error
    return factory
