"""A data set that ends, with a real worker, trainer loop and Redis; the engine and the model are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.queue import Broker
from rollout.tasks import Prompt, Response, make_task
from tests.conftest import ConfigFactory
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import make_worker, serving, tiny_folder, until
from tests.trainer import sim
from tests.trainer.helpers import OneRank
from tests.trainer.sim import BigramPolicy, MemoryCheckpoints
from trainer.loop import Trainer
from trainer.metrics import JsonLines
from trainer.progress import RunFailed

PROMPTS = 10


def fails(_prompt: Prompt, _response: Response) -> float:
    raise ValueError("'seven' is no number")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reward", [None, fails])
async def test_the_end_of_the_data_set_ends_trainer_and_worker(
    redis_url: str,
    make_config: ConfigFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reward: Callable[[Prompt, Response], float] | None,
) -> None:
    """reward: of the task, None: one that works."""
    monkeypatch.setattr(sim, "VOCABULARY", 32)
    trainer_section = {"groups_per_step": 3, "collective_timeout_s": 1.0, "optimizer": {"learning_rate": 1e-3}}
    config = make_config(**{"run.steps": 100, "lag.max": 8, "trainer": trainer_section})
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    real, engine, policy = make_task("max-digit", 0), FakeEngine(version="0"), BigramPolicy()

    def prompt(index: int) -> Prompt:
        if index >= PROMPTS:
            raise IndexError(f"1 epochs of rows end before prompt {index}")
        return real.prompt(index)

    task: Any = SimpleNamespace(name=real.name, prompt=prompt, reward=reward or real.reward)
    worker = make_worker(config, broker, tiny_folder(tmp_path), task=task)
    trainer = Trainer(
        config,
        broker=broker,
        ranks=OneRank(),
        policy=policy,
        checkpoints=MemoryCheckpoints().of(policy),
        sink=lambda step: JsonLines(config.run.folder / "metrics.jsonl", step),
        route_shape=None,
    )
    with engine.serve() as url:
        training = asyncio.create_task(asyncio.to_thread(trainer.run))
        working = asyncio.create_task(worker.run(asyncio.Event()))
        await until(lambda: broker.published() is not None)
        serving(broker, url, 0)
        if reward is not None:
            with pytest.raises(RunFailed, match=rf"{PROMPTS} of its prompts are dead letters.*'seven' is no number"):
                await training
            broker.set_status("stopped")  # as `up` does
            await working
            broker.close()
            return
        assert await training == "finished"
        await working  # by itself, as the run is finished
    seen = broker.snapshot()
    assert (seen.status, seen.step, seen.durable_step) == ("finished", PROMPTS // 3, PROMPTS // 3)
    assert (seen.groups.ready, seen.dead_letters, seen.groups.closes) == (PROMPTS % 3, 0, True)
    broker.close()
