"""Exact quantiles over all ranks by radix selection on the bits of floats.

Invariant: the answer depends on the multiset of values alone, to the last bit: not on how they lie on ranks or
micro-batches, nor on their order. Only integer counts are added up; non-negative floats order as their bits do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SumCounts = Callable[[Tensor], Tensor]


def alone(counts: Tensor) -> Tensor:
    """The sum over one rank."""
    return counts


def exact_quantile(
    values: Tensor, alpha: float, *, weights: Tensor | None = None, sum_counts: SumCounts = alone
) -> float:
    """The alpha-quantile of the values of all ranks with linear interpolation (numpy's "linear").

    values: float32 or float64 [n], finite and >= 0; n may be 0 on some ranks or all. alpha in [0, 1]. weights: int64
    [n] >= 0, how often a value counts; default once. sum_counts: adds int64 counts over the ranks; collective, called
    once per byte of the dtype (4 or 8 times) with [2, 256]. Returns nan if nothing counts; for float32 values the
    result is rounded to float32, so that comparing it with values of that dtype is exact.
    """
    wide = values.dtype == torch.float64
    if not wide and values.dtype != torch.float32:
        raise TypeError(f"values are {values.dtype}, expected float32 or float64")
    if sum_counts is alone and weights is None:
        return _sorted_quantile(values.detach(), alpha)
    rounds = 8 if wide else 4
    kind = torch.int64 if wide else torch.int32
    bits = (values.detach().contiguous() + 0.0).view(kind).to(torch.int64)  # + 0.0 turns -0 into 0
    counted = torch.ones_like(bits) if weights is None else weights.to(torch.int64)
    prefixes = [0, 0]  # bits of the two neighbouring order statistics, found so far
    ranks_left = [0, 0]
    fraction = 0.0
    for index in range(rounds):
        shift = 8 * (rounds - 1 - index)
        histogram = torch.zeros(2, 256, dtype=torch.int64, device=values.device)
        for side, prefix in enumerate(prefixes):
            alike = (bits >> (shift + 8)) == prefix if index else torch.ones_like(bits, dtype=torch.bool)
            histogram[side].index_add_(0, (bits[alike] >> shift) & 255, counted[alike])
        histogram = sum_counts(histogram).cpu()
        if index == 0:
            total = int(histogram[0].sum())
            if total == 0:  # the same on all ranks: all leave here
                return math.nan
            position = alpha * (total - 1)
            below = min(int(position), total - 1)
            fraction = position - below
            ranks_left = [below, min(below + 1, total - 1)]
        for side in (0, 1):
            cumulative = torch.cumsum(histogram[side], 0)
            bucket = int(torch.searchsorted(cumulative, ranks_left[side], right=True))
            ranks_left[side] -= int(cumulative[bucket - 1]) if bucket else 0
            prefixes[side] = prefixes[side] << 8 | bucket
    low, high = (float(torch.tensor(p, dtype=torch.int64).to(kind).view(values.dtype)) for p in prefixes)
    return _between(low, high, fraction, wide=wide)


def _sorted_quantile(values: Tensor, alpha: float) -> float:
    """The same number, faster on one rank: a partial sort finds the same two neighbours."""
    if not len(values):
        return math.nan
    position = alpha * (len(values) - 1)
    below = min(int(position), len(values) - 1)
    wanted = [below, min(below + 1, len(values) - 1)]
    if values.device.type == "cpu":
        low, high = np.partition(values.numpy(), sorted(set(wanted)))[wanted].tolist()
    else:
        low, high = values.sort().values[torch.tensor(wanted, device=values.device)].tolist()
    return _between(low, high, position - below, wide=values.dtype == torch.float64)


def _between(low: float, high: float, fraction: float, *, wide: bool) -> float:
    value = low + (high - low) * fraction
    return value if wide else float(torch.tensor(value, dtype=torch.float32))


def prefix_mean_threshold(values: Tensor, bound: float, *, sum_over: SumCounts = alone) -> float:
    """The largest x such that the mean of all values <= x, over all ranks, is below `bound`; -1 if there is none.

    values: float32 [n], finite and >= 0. The mean of the smallest values grows with their number, so bisection on the
    float's bits finds x in 31 rounds of one all-reduce of two float64 sums. Collective.
    """
    wide = values.detach().to(torch.float64)
    low, high = -1, 0x7F800000  # bits: low fits (or nothing does), high does not (or is above every value)
    while high - low > 1:
        middle = (low + high) // 2
        x = torch.tensor(middle, dtype=torch.int32).view(torch.float32).to(torch.float64).to(values.device)
        kept = wide <= x
        count, total = sum_over(torch.stack([kept.sum().to(torch.float64), wide[kept].sum()])).tolist()
        if count == 0 or total < bound * count:
            low = middle
        else:
            high = middle
    return -1.0 if low < 0 else float(torch.tensor(low, dtype=torch.int32).view(torch.float32))
