"""Tasks of several turns: an environment answers what the model says (docs/add-a-task.md)."""

from rollout.environments.episode import Episode, PrefixBroken, Turn
from rollout.environments.types import Environment, Step

__all__ = ["Environment", "Episode", "PrefixBroken", "Step", "Turn"]
