"""The learning rate: warm-up, cosine, and what staleness takes from it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from configs.schema import OptimizerSection
from tests.trainer.helpers import given
from trainer.schedule import learning_rate, staleness_factor


def optimizer(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"learning_rate": 1.0, **values})


def test_the_warm_up_rises_linearly_to_the_peak_and_a_constant_rate_stays_there() -> None:
    rates = [learning_rate(optimizer(warmup_steps=4), step, 10) for step in range(10)]
    assert rates == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_the_cosine_falls_from_the_peak_to_the_minimum_over_the_steps_after_the_warm_up() -> None:
    chosen = optimizer(schedule="cosine", warmup_steps=2, min_learning_rate=0.1)
    rates = [learning_rate(chosen, step, 12) for step in range(13)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)  # half way
    assert rates[12] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[2:]))
    assert rates[4] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2)


@pytest.mark.parametrize(
    ("how", "lag", "ess", "want"),
    [
        ("none", 8.0, 0.1, 1.0),
        ("lag", 0.0, 0.1, 1.0),
        ("lag", 0.5, 0.1, 1.0),
        ("lag", 4.0, 0.1, 0.25),
        ("ess", 4.0, 0.3, 0.3),
        ("lag", None, None, 1.0),
        ("ess", None, None, 1.0),
    ],
)
def test_a_stale_step_is_taken_with_a_smaller_rate(how: str, lag: float | None, ess: float | None, want: float) -> None:
    assert staleness_factor(optimizer(staleness=how), lag, ess) == want


@given(st.sampled_from(["none", "lag", "ess"]), st.floats(0, 1000), st.floats(0, 1))
def test_the_factor_never_raises_the_rate(how: str, lag: float, ess: float) -> None:
    assert 0 <= staleness_factor(optimizer(staleness=how), lag, ess) <= 1
