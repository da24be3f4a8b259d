"""Fifty joins, leaves and kills of real engines and workers in a run of the real system, which learns all the same.

Everything is real: Redis, two SGLang engines, the Megatron trainer, weight-sync and the workers are processes of one
`lagrange up`; workers that join are further processes, and engines leave and join over weight-sync's HTTP.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest
from structlog import get_logger

from broker.queue import Broker
from broker.types import EngineRecord, Snapshot
from configs import load_config
from tests.integration.running import ROOT, RunningLoop, pids_of, running_loop

pytestmark = [pytest.mark.engine, pytest.mark.megatron, pytest.mark.soak, pytest.mark.timeout(2400)]
ENGINE_KILLS = 12
Change = Callable[[random.Random], None]
START_S = 400.0  # of an engine: about a minute of both cores


@dataclass
class Fleet:
    """The run's engines and the workers that joined. killed: when, of those that are not back yet; down: those of them
    that were seen to be away."""

    loop: RunningLoop
    broker: Broker
    sync: str
    guests: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    pids: dict[str, int] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    left: EngineRecord | None = None
    guests_so_far: int = 0
    worker_killed: float = -math.inf

    def routable(self) -> list[EngineRecord]:
        """Engines that serve; notes those that came back, and what their supervisors said of their processes."""
        records = [r for r in self.broker.engines() if r.routable]
        self.pids |= {r.engine_id: r.pid for r in records if r.pid > 0}  # who joins over HTTP does not say it
        serving = {r.engine_id for r in records}
        self.down |= self.killed.keys() - serving  # a kill is in the record only when weight-sync has seen it
        for name in serving & self.down:
            self.down.remove(name)
            self.recoveries.append(round(time.monotonic() - self.killed.pop(name), 1))
        return records

    def both_serve(self) -> bool:
        """Whether there is an engine to spare."""
        return len(self.routable()) == 2 and not self.killed

    def kill_engine(self, dice: random.Random) -> None:
        """kill -9 of a server with all its processes."""
        victim = dice.choice(self.routable())
        self.killed[victim.engine_id] = time.monotonic()
        os.killpg(self.pids[victim.engine_id], signal.SIGKILL)

    def engine_leaves(self, dice: random.Random) -> None:
        """Over HTTP."""
        self.left = dice.choice(self.routable())
        answer = httpx.delete(f"{self.sync}/v1/engines/{self.left.engine_id}?drain_s=1", timeout=30, trust_env=False)
        assert answer.status_code == 200, answer.text

    def engine_joins(self, _dice: random.Random) -> None:
        """The one that left, over HTTP."""
        assert self.left is not None
        body = {"engine_id": self.left.engine_id, "url": self.left.url}
        answer = httpx.post(f"{self.sync}/v1/engines", json=body, timeout=30, trust_env=False)
        assert answer.status_code in (200, 201), answer.text
        self.left = None

    def worker_joins(self, _dice: random.Random) -> None:
        """A process of its own."""
        self.guests_so_far += 1
        index, config = str(10 + self.guests_so_far), str(self.loop.folder / "config.yaml")
        command = [sys.executable, "-m", "services", "rollout", "--config", config, "--index", index]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.loop.folder / "logs" / f"guest-{index}.log").open("wb") as log:
            guest = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.guests.append(guest)

    def worker_leaves(self, _dice: random.Random) -> None:
        """SIGTERM: it hands its tickets back."""
        guest = self.guests.pop()
        guest.send_signal(signal.SIGTERM)
        assert guest.wait(30) in (0, -signal.SIGTERM)  # the signal itself: it was still importing, and held nothing

    def own_workers(self) -> list[int]:
        """The run's own, as far as they run, by process id."""
        return sorted(set(pids_of("worker", self.loop.folder)) - {guest.pid for guest in self.guests})

    def may_kill_worker(self) -> bool:
        """Not more often than every 30 s: `up` takes a process that ends six times within 120 s for broken."""
        return time.monotonic() > self.worker_killed + 30 and bool(self.own_workers())

    def kill_worker(self, dice: random.Random) -> None:
        """kill -9 of one of the run's own, which is started again."""
        os.kill(dice.choice(self.own_workers()), signal.SIGKILL)
        self.worker_killed = time.monotonic()

    def changes(self, dice: random.Random) -> list[Change]:
        """Fifty, in an order of the dice: 12 kills of engines and 8 of workers, the others join or leave."""
        turns: list[tuple[Change, ...]] = []
        turns += [(self.kill_engine,)] * ENGINE_KILLS
        turns += [(self.engine_leaves, self.kill_worker, self.engine_joins)] * 6
        turns += [(self.worker_joins, self.worker_leaves)] * 9
        turns += [(self.kill_worker,)] * 2
        dice.shuffle(turns)
        return [change for turn in turns for change in turn]

    def may(self, change: Change, _seen: Snapshot) -> bool:
        """Whether a change can happen now."""
        if change in (self.kill_engine, self.engine_leaves):
            return self.both_serve()
        return change != self.kill_worker or self.may_kill_worker()


@contextmanager
def fleet_of(loop: RunningLoop) -> Iterator[Fleet]:
    config = load_config(loop.folder / "config.yaml")
    assert config.redis.url is not None
    broker = Broker.connect(config.redis.url, config.run.id, timeout_s=5.0)
    made = Fleet(loop, broker, f"http://127.0.0.1:{config.weight_sync.port}")
    try:
        yield made
    finally:
        for guest in made.guests:
            guest.kill()
            guest.wait(10)
        broker.close()


def test_a_run_learns_through_fifty_joins_leaves_and_kills(tmp_path: Path) -> None:
    dice = random.Random(11)
    settings = ["run.steps=100000", f"run.directory={tmp_path}", "engine.replicas=2", "rollout.lease_s=5"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    with running_loop(tmp_path, "configs/local.yaml", *arguments) as loop, fleet_of(loop) as fleet:
        loop.wait_for(lambda _seen: fleet.both_serve(), "both engines", START_S)
        began, step = time.monotonic(), loop.wait_for_step(1, START_S).step
        for change in fleet.changes(dice):
            loop.wait_for(partial(fleet.may, change), change.__name__, START_S)
            change(dice)
            step = loop.wait_for_step(step + 1, START_S).step
        seen = loop.wait_for(lambda _seen: fleet.both_serve(), "everybody is back", START_S)
        seconds = round(time.monotonic() - began)
        counters, rewards = seen.counters, [record["reward_mean"] for record in loop.metrics()]
    first, last = statistics.fmean(rewards[:10]), statistics.fmean(rewards[-10:])
    get_logger().info(
        "fifty changes",
        seconds=seconds,
        steps=seen.step,
        reward=(round(first, 3), round(last, 3)),
        seconds_from_kill_to_routable=fleet.recoveries,
        tokens_sampled=counters.get("generated_tokens"),
        tokens_thrown_away=counters.get("discarded_tokens", 0),
        answers_lost=counters.get("generation_retries", 0),
        groups=seen.groups,
        dead_letters=seen.dead_letters,
    )
    assert seen.groups.closes
    assert seen.tokens.closes
    assert seen.dead_letters == 0
    assert len(fleet.recoveries) == ENGINE_KILLS
    assert last > first + 0.3, rewards
