"""The trainer: Megatron model, losses, routing replay, checkpoints and the training loop. The only package that needs torch."""
