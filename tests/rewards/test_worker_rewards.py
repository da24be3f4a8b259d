"""The worker with rewards in processes, and with groups that teach nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.queue import Broker
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import make_worker, ready, ready_groups, serving, tiny_folder, until
from tests.rollout.test_worker import working


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="0")


@pytest.fixture
def run(broker: Broker, engine: FakeEngine) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        run = Run(broker).start()
        broker.remove_engine("engine-1")
        serving(broker, stack.enter_context(engine.serve()), 0)
        yield run


async def test_groups_of_equal_rewards_are_dropped_counted_and_replaced(
    run: Run, engine: FakeEngine, tmp_path: Path, make_config: ConfigFactory
) -> None:
    asked = 0

    def answer(prompt: list[int], _rng: object) -> list[int]:
        nonlocal asked
        asked += 1
        right = max(prompt[:-1])
        return [right if asked > 12 and asked % 2 else 1, 2]  # the first groups are all wrong

    engine.answer = answer
    config = make_config(**{"task.drop_equal_groups": True, "rollout.concurrent_groups": 1})
    worker = make_worker(config, run.broker, tiny_folder(tmp_path))
    async with working(worker):
        await until(lambda: ready(run.broker) == 4, 30.0)
    snapshot = run.broker.snapshot()
    dropped = worker.counters.totals()["groups_dropped_equal"]
    assert dropped >= 6
    assert snapshot.groups.filtered == dropped
    assert snapshot.groups.failed == 0
    assert snapshot.dead_letters == 0
    for group in ready_groups(run, 2):
        assert len({t.reward for t in group.trajectories}) == 2
    run.assert_closed()
