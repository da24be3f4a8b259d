"""While training: the right versions are evaluated, on weights that cannot be taken away, and the best one is kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from broker.queue import Broker
from broker.types import VersionRecord
from rollout.client import EngineClient
from rollout.engines import EnginePool
from rollout.evaluation import follow
from rollout.evaluation.best import hold, keep_best
from rollout.evaluation.follow import Evaluator, due
from rollout.evaluation.served import OwnEngine, SharedEngines
from services.local.layout import roles
from tests.broker.helpers import Run
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import CHECKPOINT, serving, tiny_folder, until


def version(step: int) -> VersionRecord:
    return VersionRecord(step, step, "/nowhere", "")


@pytest.mark.parametrize(
    ("newest", "last", "ended", "expected"),
    [
        (None, None, True, False),
        (0, None, False, True),
        (4, 0, False, False),
        (5, 0, False, True),
        (4, 0, True, True),
        (4, 4, True, False),
    ],
)
def test_the_first_every_fifth_and_the_last_version_are_due(
    newest: int | None, last: int | None, ended: bool, expected: bool
) -> None:
    assert due(None if newest is None else version(newest), last, 5, ended) is expected


def test_held_weights_outlive_their_folder_and_the_best_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step, value in ((1, 0.5), (2, 0.4), (3, 0.6)):
        source = tmp_path / str(step)
        source.mkdir()
        (source / "model.safetensors").write_text(str(step))
        hold(source, run / ".evaluated")
        (source / "model.safetensors").unlink()
        record = {"label": "a", "avg@8": {"value": value}, "version": step, "step": step}
        assert keep_best(run / ".evaluated", run, record, "a/avg@8") is (step != 2)
        assert not keep_best(run / ".evaluated", run, record, "b/avg@8")
    assert (run / "best" / "model.safetensors").read_text() == "3"
    assert json.loads((run / "best.json").read_text())["version"] == 3


def test_a_best_checkpoint_that_was_lost_half_way_does_not_bar_the_next(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    record = {"label": "a", "avg@8": {"value": 0.5}, "version": 1, "step": 1}
    assert keep_best(held, tmp_path, record, "a/avg@8")
    (tmp_path / "best").rmdir()  # killed after the old one went and before the new one came
    assert keep_best(held, tmp_path, record | {"avg@8": {"value": 0.4}}, "a/avg@8")
    assert json.loads((tmp_path / "best.json").read_text())["value"] == 0.4


async def test_a_run_is_evaluated_to_its_last_version(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path)
    tasks = [{"name": "max-digit", "prompts": 3, "samples": 2}]
    evaluation = {"tasks": tasks, "every_steps": 1, "best": "max-digit/avg@2"}
    config = make_config(**{"model": {"path": folder}, "evaluation": evaluation})
    config.run.folder.mkdir(parents=True)
    run = Run(broker).start()
    broker.publish(run.epoch, VersionRecord(0, 0, str(folder), "x"))
    engine = FakeEngine(version="unconfirmed", answer=lambda prompt, _rng: [max(prompt[:-1])])
    loaded: list[int] = []

    async def load(place: Path, number: int) -> None:
        assert (place / "config.json").exists()
        loaded.append(number)
        engine.version = str(number)
        broker.set_status("finished")

    evaluator = Evaluator(config, broker)
    with engine.serve() as url:
        async with EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20) as client:
            await asyncio.wait_for(evaluator.run(asyncio.Event(), OwnEngine(client, load)), 60)
    record = json.loads((config.run.folder / "metrics.jsonl").read_text())["evaluation"]
    assert broker.evaluations() == [record]
    assert (record["version"], record["step"], record["evaluation_lag"], loaded) == (0, 0, 0, [0])
    assert record["avg@2"]["value"] == 1.0
    assert (config.run.folder / "best" / "config.json").exists()
    assert not (config.run.folder / ".evaluated").exists()


def test_up_starts_the_evaluator_only_if_there_is_something_to_evaluate(make_config: ConfigFactory) -> None:
    with_tasks = make_config(**{"evaluation": {"tasks": [{"name": "max-digit"}]}})
    names = [[role.name for role in roles(config, Path("c.yaml"))] for config in (make_config(), with_tasks)]
    assert "evaluator" not in names[0]
    assert names[1] == [*names[0], "evaluator"]


async def test_an_evaluation_ends_when_it_is_told_to(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path)
    config = make_config(**{"model": {"path": folder}, "evaluation": {"tasks": [{"name": "max-digit"}]}})
    config.run.folder.mkdir(parents=True)
    broker.publish(Run(broker).start().epoch, VersionRecord(0, 0, str(folder), "x"))
    stop, never = asyncio.Event(), asyncio.Event()

    async def load(_place: Path, _number: int) -> None:
        stop.set()
        await never.wait()

    async with EngineClient("http://127.0.0.1:1", CHECKPOINT, api_key=None, timeout_s=1) as client:
        await asyncio.wait_for(Evaluator(config, broker).run(stop, OwnEngine(client, load)), 20)
    assert not (config.run.folder / "metrics.jsonl").exists()


async def test_a_last_version_that_cannot_be_loaded_does_not_keep_the_evaluator_for_good(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    folder = tiny_folder(tmp_path)
    config = make_config(**{"model": {"path": folder}, "evaluation": {"tasks": [{"name": "max-digit"}]}})
    config.run.folder.mkdir(parents=True)
    broker.publish(Run(broker).start().epoch, VersionRecord(0, 0, str(tmp_path / "gone"), "x"))
    broker.set_status("finished")
    tried: list[Path] = []

    def gone(source: Path, target: Path) -> None:
        tried.append(source)
        raise FileNotFoundError(source)

    async def load(_place: Path, _number: int) -> None:
        raise AssertionError("there is nothing to load")

    monkeypatch.setattr(follow, "hold", gone)
    async with EngineClient("http://127.0.0.1:1", CHECKPOINT, api_key=None, timeout_s=1) as client:
        await asyncio.wait_for(Evaluator(config, broker).run(asyncio.Event(), OwnEngine(client, load)), 30)
    assert len(tried) == follow.LAST_TRIES


async def test_an_evaluation_that_was_asked_for_is_done_though_none_is_due(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path)
    tasks = [{"name": "max-digit", "prompts": 2, "samples": 1}]
    config = make_config(**{"model": {"path": folder}, "evaluation": {"tasks": tasks, "every_steps": 1000}})
    config.run.folder.mkdir(parents=True)
    run = Run(broker).start()
    broker.publish(run.epoch, VersionRecord(0, 0, str(folder), "x"))
    engine, stop = FakeEngine(version="0"), asyncio.Event()

    async def load(_place: Path, number: int) -> None:
        engine.version = str(number)

    with engine.serve() as url:
        async with EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20) as client:
            work = asyncio.create_task(Evaluator(config, broker).run(stop, OwnEngine(client, load)))
            await until(lambda: len(broker.evaluations()) == 1)
            assert broker.steer("evaluate", why="by a test").done
            await until(lambda: len(broker.evaluations()) == 2)
            stop.set()
            await asyncio.wait_for(work, 20)


async def test_on_shared_engines_a_version_is_scored_by_priority_or_given_up_when_it_is_gone(
    broker: Broker, make_config: ConfigFactory, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path)
    arguments = ["--enable-priority-scheduling", "--disable-priority-preemption"]
    tasks = [{"name": "max-digit", "prompts": 4, "samples": 2}]
    settings = {"evaluation": {"tasks": tasks, "engines": "shared"}, "engine": {"extra_arguments": arguments}}
    config = make_config(**{"model": {"path": folder}, "rollout.concurrent_groups": 1, **settings})
    config.run.folder.mkdir(parents=True)
    run = Run(broker).start()
    broker.remove_engine("engine-1")
    broker.publish(run.epoch, VersionRecord(0, 0, str(folder), "x"))
    engine, stop, calls, newer = FakeEngine(version="0"), asyncio.Event(), 0, broker.name_version(run.epoch)

    def answer(prompt: list[int], _rng: object) -> list[int]:
        nonlocal calls
        calls += 1
        if (
            calls == 3
        ):  # in the middle of the first evaluation the engine goes on to a version that is not published yet
            engine.version = str(newer)
            serving(broker, url, newer)
        return [max(prompt[:-1])]

    engine.answer = answer

    def connect(url: str) -> EngineClient:
        return EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20, priority=7)

    pool = EnginePool(broker, connect, 20)
    with engine.serve() as url:
        serving(broker, url, 0)
        work = asyncio.create_task(Evaluator(config, broker).run(stop, SharedEngines(pool, 5.0)))
        await until(lambda: calls >= 3)
        broker.publish(run.epoch, VersionRecord(newer, 1, str(folder), "x"))
        await until(lambda: len(broker.evaluations()) == 1)
        stop.set()
        await asyncio.wait_for(work, 20)
        await pool.close()
    (record,) = broker.evaluations()
    assert (record["version"], record["missing"], record["discarded_other_version"]) == (newer, 0, 0)
    assert {body["priority"] for body in engine.calls("/generate")} == {7}


def test_shared_engines_must_schedule_by_priority_and_may_not_preempt(make_config: ConfigFactory) -> None:
    evaluation = {"tasks": [{"name": "max-digit"}], "engines": "shared"}
    with pytest.raises(ValueError, match="disable-priority-preemption"):
        make_config(**{"evaluation": evaluation, "engine": {"extra_arguments": ["--enable-priority-scheduling"]}})
