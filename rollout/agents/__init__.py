"""Agents of one's own: they talk to an OpenAI-compatible endpoint, and their calls become trajectories."""

from rollout.agents.types import AgentTask

__all__ = ["AgentTask"]
