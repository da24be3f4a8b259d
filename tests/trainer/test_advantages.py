"""Advantages: conventions of the registry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from broker.types import all_equal
from tests.trainer.helpers import OneRank, given, group, settings, trajectory
from trainer.advantages import group_advantages
from trainer.data import is_filtered, samples_of

NAMES = ("grpo", "dr-grpo", "rloo", "reinforce++")
names = st.sampled_from(NAMES)


def test_grpo_divides_by_the_unbiased_deviation_plus_1e_6() -> None:
    got = group_advantages([1.0, 0.0, 0.0, 1.0], "grpo")
    deviation = np.sqrt(4 * 0.25 / 3)
    assert got.tolist() == pytest.approx([0.5 / (deviation + 1e-6), -0.5 / (deviation + 1e-6)] * 1 + [-got[0], got[0]])


def test_dr_grpo_subtracts_the_mean_alone_and_rloo_the_mean_of_the_others() -> None:
    assert group_advantages([1.0, 0.0, 0.5], "dr-grpo").tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert group_advantages([1.0, 0.0, 0.5], "rloo").tolist() == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])


@given(names, st.floats(-10, 10), st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(how: str, reward: float, n: int) -> None:
    assert group_advantages([reward] * n, how).tolist() == [0.0] * n  # type: ignore[arg-type]


def test_eight_times_a_reward_that_floats_cannot_say_is_still_equal() -> None:
    rewards = [float(np.float32(0.7))] * 8
    assert all_equal(rewards)
    assert not group_advantages(rewards, "grpo").any()


@given(names, st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_advantages_of_a_group_sum_to_zero(how: str, rewards: list[float]) -> None:
    assert group_advantages(rewards, how).sum() == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]


def test_a_sample_that_is_masked_out_still_counts_in_the_baseline() -> None:
    members = [
        trajectory([1], [2], reward=1.0, mask=[False]),
        trajectory([1], [2], reward=0.0),
        trajectory([1], [2], reward=0.0),
    ]
    samples = samples_of([group(1, members)], settings("grpo", advantage="dr-grpo"), OneRank())
    assert [float(s.advantages[0]) for s in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_groups_of_uneven_size_are_normalised_each_by_its_own_members() -> None:
    groups = [
        group(1, [trajectory([1], [2], reward=r) for r in (1.0, 0.0)]),
        group(2, [trajectory([1], [2], reward=r) for r in (1.0, 0.0, 0.0, 0.0)]),
    ]
    samples = samples_of(groups, settings("grpo", advantage="dr-grpo"), OneRank())
    assert [float(s.advantages[0]) for s in samples] == pytest.approx([0.5, -0.5, 0.75, -0.25, -0.25, -0.25])


def test_reinforce_plus_plus_has_unit_deviation_over_the_batch() -> None:
    groups = [
        group(i, [trajectory([1], [2], reward=r) for r in rewards])
        for i, rewards in enumerate(([1.0, 0.0], [5.0, 0.0, 1.0]))
    ]
    samples = samples_of(groups, settings("grpo", advantage="reinforce++"), OneRank())
    assert np.std([float(s.advantages[0]) for s in samples], ddof=1) == pytest.approx(1.0, rel=1e-5)


def test_dapo_drops_groups_of_equal_reward_and_the_others_keep_them_with_advantage_zero() -> None:
    flat = group(1, [trajectory([1], [2], reward=1.0) for _ in range(2)])
    assert is_filtered(flat)
    assert samples_of([flat], settings("dapo"), OneRank()) == []
    assert [float(s.advantages[0]) for s in samples_of([flat], settings("grpo"), OneRank())] == [0.0, 0.0]


def test_a_group_without_trainable_tokens_has_no_gradient() -> None:
    assert is_filtered(group(1, [trajectory([1], [2], reward=r, mask=[False]) for r in (0.0, 1.0)]))
