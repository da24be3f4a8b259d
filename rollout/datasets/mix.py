"""Several sources mixed by weight.

Invariant: `Mixture.place` is pure; in every block of `len(pattern)` prompts each source has its share, rounded by
largest remainders, and a source's own indexes are 0, 1, 2, ... without gap: no row is left out or comes twice early.
`FiniteMixture` gives each place of its sources once and then nothing.
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

    def index_of(self, source: int, place: int) -> int:
        """The prompt at a source's own index: the inverse of `place`."""
        block, nth = divmod(place, self.shares[source])
        return block * len(self.pattern) + [at for at, of in enumerate(self.pattern) if of == source][nth]

    def used(self, source: int, index: int) -> int:
        """How many prompts before `index` are of a source."""
        block, at = divmod(index, len(self.pattern))
        return block * self.shares[source] + self.pattern[:at].count(source)


@dataclass(frozen=True, slots=True)
class FiniteMixture:
    """A mixture whose sources end: mixed until the first has ended, then what the others have left, in their order.

    mixed: prompts until then. left: of each source the first of its own indexes that comes after, and its end.
    """

    mixture: Mixture
    mixed: int
    left: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, mixture: Mixture, lengths: Sequence[int]) -> FiniteMixture:
        """lengths: how many prompts each source has."""
        mixed = min(mixture.index_of(source, length) for source, length in enumerate(lengths))
        return cls(
            mixture, mixed, tuple((mixture.used(source, mixed), length) for source, length in enumerate(lengths))
        )

    def place(self, index: int) -> tuple[int, int]:
        """As Mixture.place. Raises IndexError after the last prompt."""
        if index < self.mixed:
            return self.mixture.place(index)
        rest = index - self.mixed
        for source, (first, end) in enumerate(self.left):
            if first + rest < end:
                return source, first + rest
            rest -= end - first
        raise IndexError(f"there is no prompt {index}")


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_rest[: max(0, BLOCK - sum(shares))]:
        shares[i] += 1
    return tuple(shares)
