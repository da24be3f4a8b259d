"""The order of a data set: every index has its row, and every epoch holds every row once, in an order of its own.

Invariant: `row_of` is a pure function of its arguments, so any worker finds the row of any index, and a restarted run
that goes on at the trained frontier sees the rows that it would have seen. Nothing is kept: no list of a whole epoch.
"""

from __future__ import annotations

import hashlib

ROUNDS = 6


def row_of(index: int, rows: int, seed: int, *, shuffle: bool = True) -> int:
    """The row, 0 .. rows - 1, of prompt `index`; epoch number index // rows has an order of its own.

    The order is a Feistel permutation of the smallest power of four that holds all rows, walked until it falls inside
    them (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): four steps at most on average.
    Raises ValueError for a negative index or no rows.
    """
    if rows < 1 or index < 0:
        raise ValueError(f"no row {index} of {rows}")
    epoch, place = divmod(index, rows)
    if not shuffle or rows == 1:
        return place
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    key = f"{seed}/{epoch}".encode()
    place = _permuted(place, half, key)
    while place >= rows:
        place = _permuted(place, half, key)
    return place


def _permuted(value: int, half: int, key: bytes) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(ROUNDS):
        digest = hashlib.blake2b(b"%d/%d" % (number, right), key=key[:64], digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half | right
