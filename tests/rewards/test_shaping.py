"""Shaping adds what the configuration says, and nothing by default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import ShapingSection
from rollout.rewards.shaping import Shaping, overlong
from rollout.tasks import Response


def response(tokens: int, text: str = "x", finish: str = "stop") -> Response:
    return Response(text=text, ids=(1,) * tokens, finish=finish)


@given(reward=st.floats(-10, 10), tokens=st.integers(1, 1000))
def test_the_defaults_change_nothing(reward: float, tokens: int) -> None:
    assert Shaping.of(ShapingSection(), 100).shaped(reward, response(tokens, finish="length")) == reward


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    assert [overlong(n, 20480, 4096) for n in (100, 16384, 18432, 20480, 30000)] == [0, 0, 0.5, 1, 1]
    shaping = Shaping.of(ShapingSection(overlong_buffer=10, overlong_penalty=0.5), 20)
    assert shaping.shaped(1.0, response(15)) == 0.75


def test_format_and_truncation() -> None:
    shaping = Shaping.of(ShapingSection(format_pattern=r"<answer>.*</answer>", format_reward=0.1), 20)
    assert shaping.shaped(1.0, response(5, "<answer>\n1</answer>")) == pytest.approx(1.1)
    assert shaping.shaped(1.0, response(5, "1")) == 1.0
    assert Shaping.of(ShapingSection(truncated_reward=-1.0), 20).shaped(1.0, response(20, finish="length")) == -1.0
