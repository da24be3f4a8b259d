"""Several sources mixed by weight.

Invariant: `Mixture.place` is pure; in every block of `len(pattern)` prompts each source has its share, rounded by
largest remainders, and a source's own indexes are 0, 1, 2, ... without gap: no row is left out or comes twice early.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 1000  # shares are kept to a thousandth


@dataclass(frozen=True, slots=True)
class Mixture:
    """pattern: the source of each place of a block; before: how often that source stands before it in the block."""

    pattern: tuple[int, ...]
    before: tuple[int, ...]
    shares: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float], seed: int) -> Mixture:
        """A mixture of len(weights) sources. Raises ValueError unless all weights are above 0."""
        if not weights or any(not weight > 0 for weight in weights):
            raise ValueError(f"the weights of a mixture are above 0, not {list(weights)}")
        shares = (1,) if len(weights) == 1 else _shares(weights)
        pattern = [source for source, share in enumerate(shares) for _ in range(share)]
        random.Random(f"mixture/{seed}").shuffle(pattern)
        seen = [0] * len(shares)
        before = []
        for source in pattern:
            before.append(seen[source])
            seen[source] += 1
        return cls(tuple(pattern), tuple(before), tuple(shares))

    def place(self, index: int) -> tuple[int, int]:
        """The source of prompt `index`, and its index in that source."""
        block, at = divmod(index, len(self.pattern))
        source = self.pattern[at]
        return source, block * self.shares[source] + self.before[at]


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_rest[: max(0, BLOCK - sum(shares))]:
        shares[i] += 1
    return tuple(shares)
