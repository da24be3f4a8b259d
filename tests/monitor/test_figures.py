"""The arithmetic of the monitor's figures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.monitor.figures import distribution, finite, wait_share
from services.monitor.views import history


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 50), st.integers(0, 20)))
def test_a_distribution_is_that_of_the_values_written_out(counts: dict[int, int]) -> None:
    values = sorted(value for value, n in counts.items() for _ in range(n))
    found = distribution(counts)
    if not values:
        assert found is None
        return
    assert found is not None
    assert (found.count, found.min, found.max) == (len(values), values[0], values[-1])
    assert found.mean == pytest.approx(sum(values) / len(values))
    for share, got in ((0.5, found.p50), (0.95, found.p95)):
        assert sum(v <= got for v in values) >= share * len(values)
        assert sum(v < got for v in values) < share * len(values)


def test_numbers_that_json_cannot_hold_become_null() -> None:
    assert finite({"a": float("nan"), "b": [float("inf"), 1]}) == {"a": None, "b": [None, 1]}


def test_a_step_that_was_done_again_after_a_restart_is_shown_once() -> None:
    assert history([{"step": 2, "reward_mean": 0.9}, {"step": 2, "reward_mean": 0.1}])["reward_mean"] == [0.9]


def test_the_wait_is_a_share_of_the_time_of_all_steps() -> None:
    assert wait_share([{"wait_s": 1.0, "step_s": 2.0}, {"wait_s": 0.0, "step_s": 2.0}, {"step_s": 9.0}]) == 0.25
