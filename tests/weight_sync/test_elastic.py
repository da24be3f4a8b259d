"""A fleet that changes all the time: engines and workers join, leave and are killed while training goes on.

Real Redis, broker, workers and weight-sync; engines are fakes whose log-probs say which weights made a token and which
answer the better the newer their weights are; the trainer is the broker's own transitions. With real engines and a real
trainer: test_fifty_changes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from structlog import get_logger

from broker.types import EngineRecord, EngineState, Outcome, Refused
from configs.schema import RunConfig
from rollout.worker import Worker
from services.weight_sync import fleet
from services.weight_sync.reconciler import Reconciler
from tests.fakes.model import is_fake_log_prob
from tests.rollout.helpers import make_worker, tiny_folder
from tests.weight_sync.live import Engine, World, config, syncing, until, write_version

GROUPS = 2
PERFECT = 30.0  # the version from which on a fake engine is always right


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
    tokens_lost: float = 0.0  # sampled, and never to be trained: of engines that died, and thrown away by workers
    rewards: list[float] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)  # seconds from a kill until the engine is routable again
    killed: dict[str, float] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def reached(self, step: int) -> bool:
        return self.steps >= step

    async def engine_joins(self) -> None:
        self.count += 1
        name, stack = f"e{self.count}", contextlib.ExitStack()
        engine = Engine(version="unconfirmed", token_seconds=0.002, context=128)
        engine.answer = partial(answer, engine)
        url = await asyncio.to_thread(stack.enter_context, engine.serve())
        self.world.engines[name], self.engines[name] = engine, stack
        self.ports[name] = int(url.rsplit(":", 1)[1])
        await fleet.join(self.reconciler, name, url)

    async def engine_leaves(self, name: str) -> None:
        await fleet.leave(self.reconciler, name, 0.05)
        await asyncio.to_thread(self.engines.pop(name).close)

    async def engine_dies(self, name: str) -> None:
        self.tokens_lost += sum(len(s.tokens) for s in self.world.engines[name].running.values())
        await asyncio.to_thread(self.engines.pop(name).close)

    async def engine_is_killed(self, name: str) -> None:
        """It dies, and its supervisor starts another process at the same address."""
        self.killed[name] = time.monotonic()
        await self.engine_dies(name)
        engine, stack = Engine(version="unconfirmed", token_seconds=0.002, context=128), contextlib.ExitStack()
        engine.answer = partial(answer, engine)
        url = await asyncio.to_thread(stack.enter_context, engine.serve(self.ports[name]))
        self.world.engines[name], self.engines[name] = engine, stack
        self.count += 1
        again = EngineRecord(name, url, EngineState.JOINING, pid=os.getpid() + self.count)
        await asyncio.to_thread(self.world.broker.register_engine, again)

    def all_back(self) -> bool:
        """Note who came back; whether all did that were killed and have not left since."""
        for name in [n for n in self.killed if n in self.engines and self.world.record(n).routable]:
            self.recoveries.append(round(time.monotonic() - self.killed.pop(name), 2))
        return not self.killed.keys() & self.engines.keys()

    def worker_joins(self) -> None:
        self.count += 1
        name, stop = f"w{self.count}", asyncio.Event()
        worker = make_worker(self.settings, self.world.broker, self.folder, name=name)
        self.workers[name] = (stop, asyncio.create_task(worker.run(stop)), worker)

    async def worker_leaves(self, name: str) -> None:
        stop, task, worker = self.workers.pop(name)
        stop.set()
        await asyncio.wait_for(task, 20)
        self.tokens_lost += worker.counters.totals().get("discarded_tokens", 0)

    async def worker_dies(self, name: str) -> None:
        """Its groups are issued again when their leases expire."""
        _stop, task, worker = self.workers.pop(name)
        worker._hand_back = partial(drop_all, worker)  # type: ignore[method-assign]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.tokens_lost += worker.counters.totals().get("discarded_tokens", 0)

    async def event(self, dice: random.Random) -> str:
        """One change of the fleet, such that one engine that lives and one worker remain."""
        choices = ["engine joins"] if len(self.engines) < 4 else []
        choices += ["engine leaves", "engine dies", "engine is killed"] if len(self.engines) > 1 else []
        choices += ["worker joins"] if len(self.workers) < 3 else []
        choices += ["worker leaves", "worker dies"] if len(self.workers) > 1 else []
        what = dice.choice(choices)
        if what == "engine joins":
            await self.engine_joins()
        elif what == "engine leaves":
            await self.engine_leaves(dice.choice(sorted(self.engines)))
        elif what == "engine dies":
            await self.engine_dies(dice.choice(sorted(self.engines)))
        elif what == "engine is killed":
            await self.engine_is_killed(dice.choice(sorted(self.engines)))
        elif what == "worker dies":
            await self.worker_dies(dice.choice(sorted(self.workers)))
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
            rewards: list[float] = []
            for group in await asyncio.to_thread(broker.fetch, [d.group_id for d in batch]):
                for t in group.trajectories:
                    rewards.append(t.reward)
                    for run in t.versions:
                        assert 0 <= version - run.version <= self.settings.lag.max
                        lags[version - run.version] = lags.get(version - run.version, 0) + run.length
                        for place in range(run.start, run.start + run.length):
                            token, position = int(t.response_ids[place]), len(t.prompt_ids) + place
                            assert is_fake_log_prob(float(t.log_probs[place]), str(run.version), position, token)
            outcomes = [Outcome(d.group_id) for d in batch]
            await asyncio.to_thread(broker.step, epoch, version, outcomes, lags, {"loss": 0.0})
            self.rewards.append(statistics.fmean(rewards))
            version, self.steps, self.tokens = version + 1, self.steps + 1, self.tokens + sum(lags.values())
            record = await asyncio.to_thread(write_version, self.world.folder / "weights", version)
            await asyncio.to_thread(broker.publish, epoch, record)


async def drop_all(worker: Worker) -> None:
    """What a worker that was killed does with its groups, in place of handing them back."""
    tasks = [held.task for held in worker._held.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def answer(engine: Engine, prompt: list[int], dice: random.Random) -> list[int]:
    """Right, and at once, with a probability that grows with the version; else another digit, and talk."""
    version = int(engine.version) if engine.version.isdigit() else 0
    right = max(prompt[:-1])  # ids of digits grow with the digit
    if dice.random() < 0.1 + version / PERFECT:
        return [right, 2]
    return [3 + (right - 2) % 10, *[dice.randrange(3, 13) for _ in range(4)], 2]


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
    dice, happened = random.Random(seed), Counter[str]()
    async with training(w, tmp_path, pause=pause) as made:
        for _ in range(events):
            happened[await made.event(dice)] += 1
            if not any(name in made.engines for name in made.reconciler.members):
                await made.engine_joins()
            await until(partial(made.reached, made.steps + 1), 60)
            made.all_back()
        await until(made.all_back, 60)
        steps = made.steps
    first, last = (statistics.fmean(part) for part in (made.rewards[:5], made.rewards[-5:]))
    figures = {"steps": steps, "tokens_trained": made.tokens, "tokens_lost": made.tokens_lost, "reward": (first, last)}
    get_logger().info("changes", happened=dict(happened), **figures, seconds_from_kill_to_routable=made.recoveries)
    assert made.tokens > 0
    if steps >= PERFECT + 10:
        assert last > first + 0.4


@pytest.mark.parametrize("pause", ["drain", "abort"])
async def test_training_goes_on_while_engines_and_workers_join_leave_and_die(
    w: World, tmp_path: Path, pause: str
) -> None:
    await changes(w, tmp_path, 6, pause, seed=10)


@pytest.mark.soak
@pytest.mark.timeout(1200)
# What is killed in this process leaves its sockets open, as no real process can.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pause", ["drain", "abort"])
async def test_fifty_joins_leaves_and_kills(w: World, tmp_path: Path, pause: str) -> None:
    await changes(w, tmp_path, 50, pause, seed=7)
