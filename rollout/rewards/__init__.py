"""Rewards: from samples to trajectories (docs/rewards.md)."""

from rollout.rewards.assemble import rewarded
from rollout.rewards.judge import Judge, ThreadJudge, make_judge
from rollout.rewards.pool import RewardFailed, RewardTimeout

__all__ = ["Judge", "RewardFailed", "RewardTimeout", "ThreadJudge", "make_judge", "rewarded"]
