"""Rollouts: engines that sample, workers that draw groups from them, tasks, rewards and evaluations."""
