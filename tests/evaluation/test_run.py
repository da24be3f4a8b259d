"""An evaluation counts answers of its version alone, whatever the engine serves meanwhile."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs import ConfigError, RunConfig
from rollout.client import EngineClient, InvalidAnswer, Sample, Sampling
from rollout.codec import FileCodec
from rollout.evaluation import alone
from rollout.evaluation.alone import held
from rollout.evaluation.engine import EngineFailed, EvaluationEngine
from rollout.evaluation.run import Plan, evaluate, result
from rollout.rewards import ThreadJudge
from rollout.tasks import make_task
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import CHECKPOINT, tiny_folder

PLAN = Plan(version=3, prompts=6, samples=4, tries=2)


async def run(engine: FakeEngine, folder: Path, plan: Plan = PLAN) -> dict[str, object]:
    task = make_task("max-digit", 0)
    with engine.serve() as url:
        async with EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20) as client:
            answers = await evaluate(
                task,
                ThreadJudge(task, 5.0),
                FileCodec(folder),
                lambda ids, n: client.generate(ids, n, Sampling(1.0, 1, (2,))),
                plan,
            )
    return result(task.name, plan, answers, step=3)


def best(prompt: list[int], _rng: random.Random) -> list[int]:
    return [max(prompt[:-1])]  # ids of digits grow with the digit


async def test_scores_carry_version_step_and_what_they_rest_on(tmp_path: Path) -> None:
    record = await run(FakeEngine(version="3", answer=best), tiny_folder(tmp_path))
    assert (record["task"], record["version"], record["step"], record["prompts"]) == ("max-digit", 3, 3, 6)
    assert record["avg@4"]["value"] == 1.0  # type: ignore[index]
    assert record["pass@4"]["low"] < 1.0  # type: ignore[index]
    assert (record["missing"], record["discarded_other_version"], record["truncated"]) == (0, 0, 1.0)


async def test_answers_of_another_version_are_thrown_away_and_counted(tmp_path: Path) -> None:
    engine = FakeEngine(version="4", answer=best)
    with pytest.raises(ValueError, match="no prompt"):
        await run(engine, tiny_folder(tmp_path), Plan(version=3, prompts=2, samples=2, tries=1))


async def test_a_version_that_changes_in_between_is_never_mixed(tmp_path: Path) -> None:
    asked = 0

    def answer(prompt: list[int], rng: random.Random) -> list[int]:
        nonlocal asked
        asked += 1
        engine.version = "3" if asked <= 8 else "4"
        return best(prompt, rng)

    engine = FakeEngine(version="3", answer=answer)
    record = await run(engine, tiny_folder(tmp_path), Plan(version=3, prompts=4, samples=4, tries=1, concurrency=1))
    assert record["discarded_other_version"] == 8
    assert record["missing"] == 8


async def test_a_failing_engine_is_asked_again(tmp_path: Path) -> None:
    engine = FakeEngine(version="3", answer=best)
    engine.fail("/generate", "status", times=3)
    record = await asyncio.wait_for(run(engine, tiny_folder(tmp_path)), 30)
    assert record["missing"] == 0


async def test_a_prompt_that_cannot_be_made_costs_itself_alone(tmp_path: Path) -> None:
    task = make_task("max-digit", 0)

    def prompt(index: int) -> Any:
        if index == 2:
            raise KeyError("answer")
        return task.prompt(index)

    broken: Any = SimpleNamespace(name=task.name, prompt=prompt, reward=task.reward)
    engine = FakeEngine(version="3", answer=best)
    with engine.serve() as url:
        async with EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20) as client:
            answers = await evaluate(
                broken,
                ThreadJudge(broken, 5.0),
                FileCodec(tiny_folder(tmp_path)),
                lambda ids, n: client.generate(ids, n, Sampling(1.0, 1, (2,))),
                PLAN,
            )
    assert sorted(answers.rewards) == [0, 1, 3, 4, 5]
    assert (answers.missing, answers.last_error) == (4, "prompt 2: KeyError: 'answer'")


async def test_engines_that_stay_away_end_an_evaluation_with_their_own_error(tmp_path: Path) -> None:
    async def away(ids: object, n: int) -> list[Sample | InvalidAnswer]:
        raise EngineFailed("no engine serves it")

    task = make_task("max-digit", 0)
    with pytest.raises(EngineFailed, match="no engine serves it"):
        await evaluate(task, ThreadJudge(task, 5.0), FileCodec(tiny_folder(tmp_path)), away, PLAN)


@pytest.mark.parametrize("fails", [False, True])
async def test_an_evaluation_alone_leaves_no_folder_unless_its_log_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    fake = FakeEngine(version="0")

    @asynccontextmanager
    async def engine(config: RunConfig, version: int) -> AsyncIterator[EvaluationEngine]:
        (config.run.folder / "logs").mkdir(parents=True)
        if fails:
            raise EngineFailed("it did not start")
        async with EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20) as client:
            server: Any = SimpleNamespace(wait=asyncio.Event().wait)
            yield EvaluationEngine(client, SimpleNamespace(log="x"), server)  # type: ignore[arg-type]

    monkeypatch.setattr(alone, "evaluation_engine", engine)
    place = tmp_path / "runs"
    settings = {"run.directory": str(place), "rollout.max_new_tokens": 1}
    config = alone.alone_config(tiny_folder(tmp_path), "max-digit", {}, settings)
    with fake.serve() as url, pytest.raises(EngineFailed) if fails else nullcontext():
        await alone.evaluate_alone(config, prompts=2, samples=1)
    assert place.exists() is fails


async def test_an_evaluation_ends_with_the_engine_that_serves_it_alone() -> None:
    ended, given_up = asyncio.Event(), False

    async def wait() -> int:
        await ended.wait()
        return -9

    async def work() -> str:
        nonlocal given_up
        try:
            ended.set()
            await asyncio.Event().wait()
        finally:
            given_up = True
        return "never"

    async def quick() -> str:
        return "done"

    server: Any = SimpleNamespace(wait=wait)
    engine = EvaluationEngine(client=SimpleNamespace(), plan=SimpleNamespace(log="sglang.log"), server=server)  # type: ignore[arg-type]
    assert await engine.during(quick()) == "done"
    with pytest.raises(EngineFailed, match=r"code -9; its log is sglang\.log"):
        await asyncio.wait_for(engine.during(work()), 20)
    assert given_up


@pytest.mark.parametrize("published", [True, False])
def test_a_version_that_a_run_published_stays_while_it_is_evaluated(tmp_path: Path, published: bool) -> None:
    version = tmp_path / "runs" / "r" / "weights" / "v000007"
    version.mkdir(parents=True)
    (version / "config.json").write_text("{}")
    if published:
        (tmp_path / "runs" / "r" / "config.yaml").touch()
    with held(version) as path:
        assert (path != version) == published
        shutil.rmtree(version)
        assert (path / "config.json").exists() == published
    assert [p.name for p in (tmp_path / "runs" / "r").glob(".eval*")] == []
    if published:
        with (
            pytest.raises(ConfigError, match=r"the run has deleted this version since \(weights\.keep\)"),
            held(version),
        ):
            pytest.fail("there is nothing to evaluate")
