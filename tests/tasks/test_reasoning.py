"""Generators of reasoning-gym give the same item for an index, and their own score."""

from __future__ import annotations

import pytest

from configs.load import ConfigError
from rollout.tasks import Response, make_task


def test_a_generator_is_a_task_by_its_name() -> None:
    pytest.importorskip("reasoning_gym")
    parameters = {"generator": "chain_sum", "parameters": {"max_terms": 2, "max_digits": 1}, "chat": False}
    task = make_task("reasoning-gym", 7, parameters)
    prompt = task.prompt(123_456)
    assert prompt == make_task("reasoning-gym", 7, parameters).prompt(123_456)
    assert prompt != make_task("reasoning-gym", 8, parameters).prompt(123_456)
    assert prompt.source == "chain_sum"
    right = str(eval(prompt.text.partition(":")[2].partition("=")[0]))
    assert task.reward(prompt, Response(f"so <answer>{right}</answer>", (), "stop")) == 1.0
    assert task.reward(prompt, Response("<answer>x</answer>", (), "stop")) < 0.5
    with pytest.raises(ConfigError, match="no_such_generator"):
        make_task("reasoning-gym", 7, {"generator": "no_such_generator"})
