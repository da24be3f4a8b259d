"""Rewards of a group become advantages.

Invariant: a group whose rewards are all equal gets exactly zero, decided on the rewards themselves and not on a float
residue; so does a group of one. Every member counts in the baseline, also one whose tokens are all masked, and each
group is normalised by its own members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.types import all_equal
from trainer.losses.catalogue import AdvantageName

EPSILON = 1e-6

Rewards = npt.NDArray[np.float64]


def group_advantages(rewards: Sequence[float], how: AdvantageName) -> Rewards:
    """float64 [n], one advantage per member of the group.

    grpo: (R - mean) / (std + 1e-6), unbiased std (arXiv 2402.03300). dr-grpo: R - mean (2503.20783). rloo:
    n / (n - 1) (R - mean), which is R less the mean of the others (2402.14740). reinforce++: R - mean, to be divided by
    the deviation over the whole batch, `normalise` (2501.03262, the variant with a group baseline).
    """
    r = np.asarray(rewards, np.float64)
    if all_equal(rewards):
        return np.zeros(len(r))
    centred = r - r.mean()
    if how == "grpo":
        return np.asarray(centred / (r.std(ddof=1) + EPSILON))
    if how == "rloo":
        return np.asarray(centred * (len(r) / (len(r) - 1)))
    return np.asarray(centred)


def batch_deviation(count: float, total: float, squares: float) -> float:
    """Unbiased standard deviation of a batch from its sums (count, sum, sum of squares), + 1e-6."""
    if count < 2:
        return 1.0
    return float(np.sqrt(max(squares - total * total / count, 0.0) / (count - 1))) + EPSILON


def sums(advantages: Sequence[Rewards]) -> npt.NDArray[np.float64]:
    """(count, sum, sum of squares) of all members of some groups, to be added over ranks."""
    flat: npt.NDArray[Any] = np.concatenate(advantages) if advantages else np.zeros(0)
    return np.array([len(flat), flat.sum(), (flat**2).sum()], np.float64)
