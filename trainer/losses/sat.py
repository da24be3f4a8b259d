"""SAT, the staleness-adaptive trust region: stale tokens keep a smaller clip radius. arXiv 2607.18722.

Invariant: 1 lies in [lo, hi] and that inside [1 - eps_low, 1 + eps_high]; tokens at or below the gate, and everything
when the gate is 0, keep the plain radii to the last bit.

The paper's full text was not at hand. From its abstract and public notes: the proxy |d|, the quantile gate, one-sided
contraction, eps = 0.2, alpha = 0.90. Our own choices, each switchable: the exact Hill form, the other kernels, the
scale, the scope of the quantile, its weight at sequence level (docs/losses.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import SatSection
from trainer.losses.tokens import LOG_RATIO_BOUND, Tokens, active_counts, sequence_mean, spread
from trainer.quantile import SumCounts, alone, exact_quantile

MAD_TO_DEVIATION = 1.4826  # a normal distribution's standard deviation is this many medians of |x|


@dataclass(frozen=True, slots=True)
class Gate:
    """quantile: q, the |log-ratio| above which a radius shrinks; 0 or nan switches SAT off. scale: s of the kernels."""

    quantile: float
    scale: float

    @property
    def acts(self) -> bool:
        """Whether any token can be gated."""
        return self.quantile > 0  # false for nan


OFF = Gate(0.0, 0.0)


def staleness(tokens: Tokens, *, sequence: bool) -> Tensor:
    """d = clamp(stop_grad(log pi - log mu), -20, 20): [T]; by sequence its mean, on each row."""
    d = tokens.log_ratio.detach()
    if sequence:
        d = spread(sequence_mean(d, tokens), tokens)
    return d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def measure_gate(parts: list[Tokens], sat: SatSection, *, sequence: bool, sum_counts: SumCounts = alone) -> Gate:
    """The gate over the tokens of `parts` and of all ranks.

    sequence: take it over sequences' mean log-ratios, weighted by their active tokens or each once
    (sat.quantile_weight). Collective when sum_counts is.
    """
    values, weights = [], []
    for tokens in parts:
        if sequence:
            counts = active_counts(tokens)[:-1]
            d = sequence_mean(tokens.log_ratio.detach(), tokens)[:-1].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            present = counts > 0
            values.append(d[present].abs())
            weight = counts[present] if sat.quantile_weight == "token" else torch.ones_like(counts[present])
            weights.append(weight.to(torch.int64))
        else:
            values.append(staleness(tokens, sequence=False)[tokens.active].abs())
    flat = torch.cat(values) if values else torch.zeros(0)
    weight_of = torch.cat(weights) if weights else None
    q = exact_quantile(flat, sat.alpha, weights=weight_of, sum_counts=sum_counts)
    if sat.scale == "quantile" or math.isnan(q):
        return Gate(q, q)
    return Gate(q, MAD_TO_DEVIATION * exact_quantile(flat, 0.5, weights=weight_of, sum_counts=sum_counts))


def kernel(x: Tensor, gate: Gate, sat: SatSection) -> Tensor:
    """K(x): share of the radius that remains at |log-ratio| x >= q. x: float, any shape; returns the same, in [0, 1].

    hill 1 / (1 + (x/q)^n); hill_shift 1 / (1 + ((x-q)/(w s))^n); gauss exp(-((x-q)/(w s))^2 / 2);
    laplace exp(-(x-q)/(w s)).
    """
    if sat.kernel == "hill":
        return 1 / (1 + (x / gate.quantile) ** sat.exponent)
    width = max(sat.width * gate.scale, torch.finfo(x.dtype).tiny)
    beyond = (x - gate.quantile).clamp_min(0) / width
    if sat.kernel == "hill_shift":
        return 1 / (1 + beyond**sat.exponent)
    if sat.kernel == "gauss":
        return torch.exp(-(beyond**2) / 2)
    return torch.exp(-beyond)


def contraction(d: Tensor, gate: Gate, sat: SatSection) -> tuple[Tensor, Tensor, Tensor]:
    """(c_minus, c_plus, gated), all shaped as d: how much of the lower and the upper radius remains, detached.

    d: signed staleness, detached. One of the two is always exactly 1: only the side towards which the policy has moved
    shrinks.
    """
    one = torch.ones_like(d)
    if not gate.acts:
        return one, one, torch.zeros_like(d, dtype=torch.bool)
    gated = d.abs() > gate.quantile
    kept = kernel(d.abs(), gate, sat).clamp_min(sat.floor)
    return torch.where(gated & (d < 0), kept, one), torch.where(gated & (d > 0), kept, one), gated


def one_radius(gate: Gate, sat: SatSection, clip_low: float, clip_high: float) -> tuple[float, float]:
    """(d*_plus, d*_minus): the log-ratio at which SAT starts to clip on each side.

    SAT's gradient equals that of plain clipping with the batch-wide radii e^{d*_plus} - 1 and 1 - e^{-d*_minus}: the
    clip condition e^d - 1 > eps c(d) has a left side that rises and a right side that falls, so it holds exactly beyond
    one d*. Solved by narrowing an interval in float64.
    """
    plain_plus = math.log1p(clip_high)
    plain_minus = -math.log1p(-clip_low)
    if not gate.acts:
        return plain_plus, plain_minus
    plus = _crossing(gate, sat, plain_plus, clip_high, torch.expm1)
    minus = _crossing(gate, sat, plain_minus, clip_low, lambda d: -torch.expm1(-d))
    return plus, minus


def _crossing(gate: Gate, sat: SatSection, plain: float, epsilon: float, moved: Callable[[Tensor], Tensor]) -> float:
    """The smallest d in [q, plain] beyond which moved(d) > epsilon K(d), within one part in 2^48 of that interval."""
    if gate.quantile >= plain:
        return plain
    low, high = gate.quantile, plain
    for _ in range(4):  # each round of one tensor narrows the interval 4096-fold
        grid = torch.linspace(low, high, 4097, dtype=torch.float64)
        beyond = moved(grid) > epsilon * kernel(grid, gate, sat).clamp_min(sat.floor)
        first = int(beyond.to(torch.int64).argmax()) if bool(beyond.any()) else 4096
        low, high = float(grid[max(first - 1, 0)]), float(grid[first])
    return high
