"""avg@k and pass@k with confidence intervals. Pure.

Invariant: samples of one prompt are not independent, so intervals are over prompts: the prompt is the unit, its mean
over samples the observation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts; low, high: 95 % confidence interval. prompts: how many it is over."""

    value: float
    low: float
    high: float
    prompts: int


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement, is right: 1 - C(n - c, k) / C(n, k).

    Unbiased for every k <= samples. Source: Chen et al. 2021, arXiv 2107.03374, equation 1. Raises ValueError.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {right} right among {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def mean_over_prompts(observations: Sequence[float]) -> Estimate:
    """Mean with its 95 % interval: normal, from the spread between prompts.

    Where all prompts agree (at 0 or 1, mostly) the spread says nothing: the interval is then Wilson's for so many
    prompts, which does not shrink to a point. One prompt: all of [0, 1] that Wilson leaves. An interval of
    observations that all lie in [0, 1], as shares do, is cut there. Raises ValueError for none.
    """
    n = len(observations)
    if n == 0:
        raise ValueError("no prompt was evaluated")
    mean = math.fsum(observations) / n
    spread = math.fsum((x - mean) ** 2 for x in observations) / (n - 1) if n > 1 else 0.0
    if spread > 0 or not 0 <= mean <= 1:
        half = Z95 * math.sqrt(spread / n)
        lowest, highest = (0.0, 1.0) if all(0 <= x <= 1 for x in observations) else (-math.inf, math.inf)
        return Estimate(mean, max(lowest, mean - half), min(highest, mean + half), n)
    centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
    return Estimate(mean, min(mean, centre - half), max(mean, centre + half), n)


def average_at_k(rewards: Sequence[Sequence[float]]) -> Estimate:
    """avg@k: mean reward of a sample. rewards: for each prompt those of its samples, prompts without any left out."""
    return mean_over_prompts([math.fsum(of) / len(of) for of in rewards if of])


def pass_rate_at_k(rewards: Sequence[Sequence[float]], k: int, threshold: float = 1.0) -> Estimate:
    """pass@k over prompts with at least k samples; a sample is right from `threshold` on."""
    return mean_over_prompts(
        [pass_at_k(len(of), sum(reward >= threshold for reward in of), k) for of in rewards if len(of) >= k]
    )
