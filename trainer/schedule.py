"""The learning rate of each step: linear warm-up, then constant or a cosine; less for a stale batch. Pure."""

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


def staleness_factor(optimizer: OptimizerSection, lag_mean: float | None, ess: float | None) -> float:
    """What the learning rate of a step is multiplied by, in [0, 1].

    lag: 1 / max(1, mean lag of the trained tokens), the modulation of staleness-aware SGD (arXiv 1511.05950) with
    tokens in the place of gradients. ess: the effective sample size (sum w)^2 / (n sum w^2) of the step's ratios
    w = pi / mu, in [1/n, 1]: the share of the batch that carries the estimate. None (no token was trained): 1.
    """
    if optimizer.staleness == "lag" and lag_mean is not None:
        return 1.0 / max(1.0, lag_mean)
    if optimizer.staleness == "ess" and ess is not None:
        return min(1.0, ess)
    return 1.0
