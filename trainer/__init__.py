"""The trainer: pulls groups, takes optimizer steps under the lag bound, checkpoints and publishes versions."""
