"""Rewards: from samples to trajectories (docs/rewards.md)."""

from rollout.rewards.assemble import rewarded
from rollout.rewards.judge import Judge, RewardFailed, RewardTimeout, ThreadJudge, make_judge

__all__ = ["Judge", "RewardFailed", "RewardTimeout", "ThreadJudge", "make_judge", "rewarded"]
