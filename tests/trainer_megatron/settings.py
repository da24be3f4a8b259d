"""A small run's configuration; without torch, so that a launcher of ranks is quick."""

from __future__ import annotations

from configs.schema import RunConfig

TEMPERATURE = 0.7


def run_config(overrides: dict[str, object]) -> RunConfig:
    """A small run with a few fields set by dotted name."""
    tree: dict[str, object] = {}
    base: dict[str, object] = {
        "run.steps": 4,
        "run.seed": 5,
        "lag.max": 1,
        "model.tiny": {},
        "task.name": "max-digit",
        "rollout.max_new_tokens": 4,
        "rollout.temperature": TEMPERATURE,
        "trainer.optimizer.learning_rate": 1e-2,
        "trainer.routing_replay": "available",
        "trainer.collective_timeout_s": 60,
    }
    for dotted, value in (base | overrides).items():
        *parents, leaf = dotted.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})  # type: ignore[assignment]
        node[leaf] = value
    return RunConfig.model_validate(tree)
