"""The learning rate of each step: linear warm-up, then constant or a cosine. Pure."""

from __future__ import annotations

import math

from configs.schema import OptimizerSection


def learning_rate(optimizer: OptimizerSection, step: int, steps: int) -> float:
    """Learning rate of the step that follows `step` finished ones, in a run of `steps`.

    Warm-up: peak x (step + 1) / warmup_steps. cosine: from the peak to min_learning_rate over what remains.
    """
    peak, warm = optimizer.learning_rate, optimizer.warmup_steps
    if step < warm:
        return peak * (step + 1) / warm
    if optimizer.schedule == "constant":
        return peak
    progress = min((step - warm) / max(steps - warm, 1), 1.0)
    low = min(optimizer.min_learning_rate, peak)
    return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2
