"""avg@k and pass@k are unbiased, and their intervals cover what they should."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.scores import pass_counts
from rollout.evaluation.estimates import average_at_k, mean_over_prompts, pass_at_k, pass_rate_at_k


@given(samples=st.integers(1, 8), right=st.integers(0, 8), k=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int, right: int, k: int) -> None:
    if right > samples or k > samples:
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(samples, right, k)
        return
    subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_one_is_the_average_of_rewards_of_zero_and_one() -> None:
    rewards = [[1.0, 0.0, 1.0, 1.0], [0.0] * 4, [1.0, 0.0, 0.0, 0.0]]
    assert pass_rate_at_k(rewards, 1).value == pytest.approx(average_at_k(rewards).value)
    assert pass_rate_at_k(rewards, 4).value == pytest.approx(2 / 3)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    source, covered = random.Random(0), 0
    for _ in range(400):
        chances = [source.random() for _ in range(100)]
        rewards = [[float(source.random() < p) for _ in range(4)] for p in chances]
        estimate = average_at_k(rewards)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_interval_is_never_a_point(value: float) -> None:
    estimate = mean_over_prompts([value] * 30)
    assert estimate.value == value
    assert 0.1 < estimate.high - estimate.low < 0.13
    assert 0 <= estimate.low <= value <= estimate.high <= 1


def test_what_was_not_evaluated_has_no_score() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        average_at_k([[]])


def test_reported_k() -> None:
    assert [pass_counts(n) for n in (1, 6, 8)] == [(1,), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_the_interval_of_a_share_lies_within_zero_and_one() -> None:
    high = mean_over_prompts([1.0] * 26 + [0.5])
    assert (high.low < high.value, high.high) == (True, 1.0)
    low = mean_over_prompts([0.0] * 26 + [0.5])
    assert (low.low, low.high > low.value) == (0.0, True)
    assert mean_over_prompts([2.0] * 26 + [1.5]).high > 2.0  # rewards are no shares
