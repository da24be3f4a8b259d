"""The exact quantile against numpy, and its independence of the layout."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from tests.trainer.helpers import given
from trainer.quantile import exact_quantile, prefix_mean_threshold

floats = st.floats(0, 2.0**120, width=32)


class Ranks:
    """Runs the same collective on several splits in lockstep, by computing the sum of all splits' counts in threads."""

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [torch.zeros(0)] * size
        self.barrier = threading.Barrier(size, timeout=100)

    def member(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def add(counts: torch.Tensor) -> torch.Tensor:
            self.slots[index] = counts
            self.barrier.wait()
            total = torch.stack(self.slots).sum(0)
            self.barrier.wait()
            return total

        return add


def on_ranks(parts: list[torch.Tensor], alpha: float) -> list[float]:
    ranks = Ranks(len(parts))
    with ThreadPoolExecutor(len(parts)) as pool:
        work = [pool.submit(exact_quantile, p, alpha, sum_counts=ranks.member(i)) for i, p in enumerate(parts)]
        return [w.result(100) for w in work]


@given(st.lists(floats, min_size=1, max_size=80), st.floats(0, 1))
def test_it_equals_numpys_linear_quantile(values: list[float], alpha: float) -> None:
    x = np.array(values, np.float32)
    expected = np.quantile(x.astype(np.float64), alpha, method="linear")
    assert exact_quantile(torch.from_numpy(x), alpha) == pytest.approx(expected, rel=1e-6, abs=1e-44)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=40), st.floats(0, 1))
def test_float64_values_keep_their_precision(values: list[float], alpha: float) -> None:
    got = exact_quantile(torch.tensor(values, dtype=torch.float64), alpha, sum_counts=lambda counts: counts)
    assert got == pytest.approx(np.quantile(np.array(values), alpha), rel=1e-12)


@given(st.lists(floats, min_size=1, max_size=60), st.floats(0, 1), st.data())
def test_it_is_the_same_to_the_last_bit_however_the_values_lie_on_ranks(
    values: list[float], alpha: float, data: st.DataObject
) -> None:
    x = torch.tensor(values)
    whole = exact_quantile(x, alpha)  # on one rank by sorting
    assert exact_quantile(x, alpha, sum_counts=lambda counts: counts) == whole
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), min_size=2, max_size=2)))
    parts = [x[order][: cuts[0]], x[order][cuts[0] : cuts[1]], x[order][cuts[1] :]]  # some may be empty
    assert on_ranks(parts, alpha) == [whole] * 3


@given(st.lists(st.tuples(floats, st.integers(0, 5)), min_size=1, max_size=40), st.floats(0, 1))
def test_a_weight_counts_like_that_many_equal_values(pairs: list[tuple[float, int]], alpha: float) -> None:
    values, weights = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    repeated = exact_quantile(torch.repeat_interleave(values, weights), alpha)
    weighted = exact_quantile(values, alpha, weights=weights)
    assert weighted == repeated or (math.isnan(weighted) and math.isnan(repeated))


def test_nothing_to_count_gives_nan_and_a_rank_may_be_empty() -> None:
    assert math.isnan(exact_quantile(torch.zeros(0), 0.9))
    assert on_ranks([torch.zeros(0), torch.tensor([1.0, 3.0])], 0.5) == [2.0, 2.0]


@pytest.mark.slow
def test_the_order_of_values_above_sixteen_million_is_no_limit() -> None:
    x = torch.arange(17_000_000, dtype=torch.float32) / 17_000_000
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(x, 0.9)
    assert exact_quantile(x, 0.9) == pytest.approx(0.9, abs=1e-6)


@given(st.lists(st.floats(0, 10, width=32), max_size=40), st.floats(0.01, 5))
def test_the_mean_of_what_is_kept_is_below_the_bound_and_no_more_could_be_kept(
    values: list[float], bound: float
) -> None:
    x = torch.tensor(values)
    threshold = prefix_mean_threshold(x, bound)
    kept = x[x <= threshold].double()
    assert len(kept) == 0 or kept.sum() < bound * len(kept)
    dropped = x[x > threshold]
    if len(dropped):
        more = x[x <= dropped.min()].double()
        assert more.sum() >= bound * len(more)


RANK = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from trainer.quantile import exact_quantile
rank, store = int(sys.argv[1]), "file://" + sys.argv[2]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
def add(counts):
    dist.all_reduce(counts)
    return counts
values = torch.rand(1001, generator=torch.Generator().manual_seed(0))
part = values[:300] if rank == 0 else values[300:]
print(exact_quantile(part, 0.9, sum_counts=add).hex())
print(exact_quantile(part[:0] if rank else part, 0.5, sum_counts=add).hex())
dist.destroy_process_group()
"""


def test_two_gloo_ranks_find_the_quantile_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True) for r in (0, 1)
    ]
    try:
        answers = [r.communicate(timeout=90)[0].split() for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    expected = [exact_quantile(values, 0.9).hex(), exact_quantile(values[:300], 0.5).hex()]
    assert answers == [expected, expected]
