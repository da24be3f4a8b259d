"""The worker with rewards in processes, and with groups that teach nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.queue import Broker
from configs.load import ConfigError
from rollout.codec import FileCodec
from rollout.rewards import make_judge
from rollout.rewards.pool import PoolLimits
from rollout.tasks import make_task
from rollout.tasks.prepare import encode_prompt, try_prompt
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import make_worker, ready, ready_groups, run_with, tiny_folder, until, working


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="0")


@pytest.fixture
def run(broker: Broker, engine: FakeEngine) -> Iterator[Run]:
    with run_with(broker, engine) as run:
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


def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}>", "answer": str(i)}) for i in range(10)))
    return str(path)


async def test_rewards_in_processes_fail_one_by_one_and_never_the_worker(
    run: Run, engine: FakeEngine, tmp_path: Path, make_config: ConfigFactory
) -> None:
    folder = tiny_folder(tmp_path)
    codec, asked = FileCodec(folder), 0
    good, bad = codec.encode("7")[0], codec.encode("<")[0]

    def answer(_prompt: list[int], _rng: object) -> list[int]:
        nonlocal asked
        asked += 1
        return [good if asked % 2 else bad, 2]

    engine.answer = answer
    parameters = {"path": rows(tmp_path), "function": "tests.rewards.hostile:score", "chat": False}
    task = make_task("function-jsonl", 0, parameters)
    limits = PoolLimits(processes=1, timeout_s=10.0)
    judge = make_judge(task, seed=0, parameters=parameters, limits=limits)
    worker = make_worker(make_config(), run.broker, folder, task=task)
    worker._judge = judge
    async with working(worker):
        await until(lambda: ready(run.broker) == 4, 60.0)
    assert worker.counters.totals()["reward_failures"] == 4
    counters = run.broker.snapshot().counters
    assert (counters["source_rows_samples"], counters["source_rows_reward"]) == (4, 28)
    assert [[t.reward for t in group.trajectories] for group in ready_groups(run, 2)] == [[7.0], [7.0]]


def test_a_model_without_a_chat_template_is_named_at_the_start(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    task = make_task("exact-jsonl", 0, {"path": rows(tmp_path)})
    with pytest.raises(ConfigError, match="chat: false"):
        try_prompt(task, FileCodec(folder))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}{% endfor %}")
    codec = FileCodec(folder)
    assert codec.decode(encode_prompt(task.prompt(0), codec)).startswith("<")
