"""A run of six steps with a checkpoint every second one, and a handle on it, for tests of the loop."""

from __future__ import annotations

from typing import Any

import pytest

from broker.queue import Broker
from tests.conftest import ConfigFactory


@pytest.fixture
def config(make_config: ConfigFactory) -> Any:
    return make_config(**{"run.steps": 6, "trainer.checkpoint": {"interval_steps": 2}, "trainer.groups_per_step": 3})


@pytest.fixture
def handle(redis_url: str, config: Any) -> Any:
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    yield broker
    broker.close()
