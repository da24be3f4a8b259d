"""A fleet that changes all the time: engines and workers join, leave and are killed while training goes on.

Real Redis, broker, workers and weight-sync; engines are fakes whose log-probs say which weights made a token, and the
trainer is the broker's own transitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from broker.types import Outcome, Refused
from configs.schema import RunConfig
from rollout.worker import Worker
from services.weight_sync import fleet
from services.weight_sync.reconciler import Reconciler
from tests.fakes.model import is_fake_log_prob
from tests.rollout.helpers import make_worker, tiny_folder
from tests.weight_sync.live import Engine, World, config, syncing, until, write_version

GROUPS = 2


@dataclass
class Fleet:
    """Engines with the contexts that end them, and workers with the events that stop them."""

    world: World
    settings: RunConfig
    folder: Path
    reconciler: Reconciler
    engines: dict[str, contextlib.ExitStack] = field(default_factory=dict)
    workers: dict[str, tuple[asyncio.Event, asyncio.Task[None], Worker]] = field(default_factory=dict)
    count: int = 0
    steps: int = 0
    tokens: int = 0

    def reached(self, step: int) -> bool:
        return self.steps >= step

    async def engine_joins(self) -> None:
        self.count += 1
        name, stack = f"e{self.count}", contextlib.ExitStack()
        engine = Engine(version="unconfirmed", token_seconds=0.002, context=128)
        url = await asyncio.to_thread(stack.enter_context, engine.serve())
        self.world.engines[name], self.engines[name] = engine, stack
        await fleet.join(self.reconciler, name, url)

    async def engine_leaves(self, name: str) -> None:
        await fleet.leave(self.reconciler, name, 0.05)
        await asyncio.to_thread(self.engines.pop(name).close)

    async def engine_dies(self, name: str) -> None:
        await asyncio.to_thread(self.engines.pop(name).close)

    def worker_joins(self) -> None:
        self.count += 1
        name, stop = f"w{self.count}", asyncio.Event()
        worker = make_worker(self.settings, self.world.broker, self.folder, name=name)
        self.workers[name] = (stop, asyncio.create_task(worker.run(stop)), worker)

    async def worker_leaves(self, name: str) -> None:
        stop, task, _worker = self.workers.pop(name)
        stop.set()
        await asyncio.wait_for(task, 20)

    async def event(self, dice: random.Random) -> str:
        """One change of the fleet, such that one engine that lives and one worker remain."""
        choices = ["engine joins"] if len(self.engines) < 4 else []
        choices += ["engine leaves", "engine dies"] if len(self.engines) > 1 else []
        choices += ["worker joins"] if len(self.workers) < 3 else []
        choices += ["worker leaves"] if len(self.workers) > 1 else []
        what = dice.choice(choices)
        if what == "engine joins":
            await self.engine_joins()
        elif what == "engine leaves":
            await self.engine_leaves(dice.choice(sorted(self.engines)))
        elif what == "engine dies":
            await self.engine_dies(dice.choice(sorted(self.engines)))
        elif what == "worker joins":
            self.worker_joins()
        else:
            await self.worker_leaves(dice.choice(sorted(self.workers)))
        return what

    async def train(self, first: int) -> None:
        """Optimizer steps without an optimizer: pull, check every token, step, publish."""
        version, broker, epoch = first, self.world.broker, self.world.epoch
        while True:
            batch = await asyncio.to_thread(broker.pull, epoch, version, GROUPS)
            if isinstance(batch, Refused):
                await asyncio.sleep(0.01)
                continue
            lags: dict[int, int] = {}
            for group in await asyncio.to_thread(broker.fetch, [d.group_id for d in batch]):
                for t in group.trajectories:
                    for run in t.versions:
                        assert 0 <= version - run.version <= self.settings.lag.max
                        lags[version - run.version] = lags.get(version - run.version, 0) + run.length
                        for place in range(run.start, run.start + run.length):
                            token, position = int(t.response_ids[place]), len(t.prompt_ids) + place
                            assert is_fake_log_prob(float(t.log_probs[place]), str(run.version), position, token)
            outcomes = [Outcome(d.group_id) for d in batch]
            await asyncio.to_thread(broker.step, epoch, version, outcomes, lags, {"loss": 0.0})
            version, self.steps, self.tokens = version + 1, self.steps + 1, self.tokens + sum(lags.values())
            record = await asyncio.to_thread(write_version, self.world.folder / "weights", version)
            await asyncio.to_thread(broker.publish, epoch, record)


@contextlib.asynccontextmanager
async def training(w: World, tmp_path: Path, **weights: str) -> AsyncIterator[Fleet]:
    tree = config(w.url, tmp_path, **weights).model_dump()
    tree["rollout"] |= {"samples_per_prompt": 2, "min_samples": 1, "max_new_tokens": 6, "concurrent_groups": 3}
    tree["rollout"] |= {"lease_s": 3.0, "generation_timeout_s": 5.0, "generation_tries": 50, "group_tries": 50}
    tree["trainer"] |= {"groups_per_step": GROUPS}
    settings = RunConfig.model_validate(tree)
    w.broker.initialise(settings)
    first = w.publish()
    async with syncing(w, drain=weights.get("pause") != "abort") as reconciler:
        made = Fleet(w, settings, tiny_folder(tmp_path), reconciler)
        await made.engine_joins()
        made.worker_joins()
        trainer = asyncio.create_task(made.train(first.version))
        try:
            yield made
            assert not trainer.done(), trainer.exception()
        finally:
            trainer.cancel()
            await asyncio.gather(trainer, return_exceptions=True)
            await asyncio.gather(*(made.worker_leaves(name) for name in list(made.workers)))
            for stack in made.engines.values():
                stack.close()
    seen = w.broker.snapshot()
    assert seen.groups.closes, seen.groups
    assert seen.tokens.closes, seen.tokens
    assert seen.dead_letters == 0


async def changes(w: World, tmp_path: Path, events: int, pause: str, seed: int) -> None:
    dice = random.Random(seed)
    async with training(w, tmp_path, pause=pause) as made:
        for _ in range(events):
            await made.event(dice)
            if not any(name in made.engines for name in made.reconciler.members):
                await made.engine_joins()
            await until(partial(made.reached, made.steps + 1), 60)
        assert made.tokens > 0


@pytest.mark.parametrize("pause", ["drain", "abort"])
async def test_training_goes_on_while_engines_and_workers_join_leave_and_die(
    w: World, tmp_path: Path, pause: str
) -> None:
    await changes(w, tmp_path, 6, pause, seed=3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pause", ["drain", "abort"])
async def test_fifty_joins_leaves_and_kills(w: World, tmp_path: Path, pause: str) -> None:
    await changes(w, tmp_path, 50, pause, seed=7)
