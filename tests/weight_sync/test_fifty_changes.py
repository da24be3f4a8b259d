"""Fifty joins, leaves and kills of real engines and workers in a run of the real system, which learns all the same.

Everything is real: Redis, two SGLang engines, the Megatron trainer, weight-sync and the workers are processes of one
`lagrange up`; workers that join are further processes, and engines leave and join over weight-sync's HTTP.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from structlog import get_logger

from broker.queue import Broker
from broker.types import EngineRecord, EngineState
from configs import load_config
from tests.integration.running import ROOT, RunningLoop, running_loop

pytestmark = [pytest.mark.engine, pytest.mark.megatron, pytest.mark.soak, pytest.mark.timeout(2400)]
START_S = 400.0
CHANGES = int(os.environ.get("LAGRANGE_TEST_CHANGES", "50"))
KILLS = CHANGES // 4  # of engines: one needs about a minute of both cores to be back


@dataclass
class Fleet:
    """The run's engines and the workers that joined. killed: when, of those that are not back yet."""

    loop: RunningLoop
    broker: Broker
    sync: str
    guests: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    left: EngineRecord | None = None
    guests_so_far: int = 0

    def routable(self) -> list[EngineRecord]:
        """Engines that serve; notes those that came back."""
        records = [r for r in self.broker.engines() if r.routable]
        for name in [r.engine_id for r in records if r.engine_id in self.killed]:
            self.recoveries.append(round(time.monotonic() - self.killed.pop(name), 1))
        return records

    def kill_engine(self, dice: random.Random) -> bool:
        """kill -9 of a server with all its processes, if another one serves."""
        serving = self.routable()
        if len(serving) < 2:
            return False
        victim = dice.choice(serving)
        self.killed[victim.engine_id] = time.monotonic()
        os.killpg(victim.pid, signal.SIGKILL)
        return True

    def engine_leaves(self, dice: random.Random) -> bool:
        """Over HTTP, if another one serves."""
        serving = self.routable()
        if len(serving) < 2 or self.left is not None:
            return False
        self.left = dice.choice(serving)
        answer = httpx.delete(f"{self.sync}/v1/engines/{self.left.engine_id}?drain_s=1", timeout=30, trust_env=False)
        assert answer.status_code == 200, answer.text
        return True

    def engine_joins(self, _dice: random.Random) -> bool:
        """The one that left, over HTTP."""
        if self.left is None:
            return False
        body = {"engine_id": self.left.engine_id, "url": self.left.url}
        answer = httpx.post(f"{self.sync}/v1/engines", json=body, timeout=30, trust_env=False)
        assert answer.status_code in (200, 201), answer.text
        self.left = None
        return True

    def worker_joins(self, _dice: random.Random) -> bool:
        """A process of its own."""
        if len(self.guests) >= 2:
            return False
        self.guests_so_far += 1
        config = str(self.loop.folder / "config.yaml")
        command = [sys.executable, "-m", "services", "rollout", config, "--index", str(10 + self.guests_so_far)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        guest = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.guests.append(guest)
        return True

    def worker_leaves(self, _dice: random.Random) -> bool:
        """SIGTERM: it hands its tickets back."""
        if not self.guests:
            return False
        guest = self.guests.pop()
        guest.send_signal(signal.SIGTERM)
        assert guest.wait(30) == 0
        return True

    def kill_worker(self, _dice: random.Random) -> bool:
        """kill -9 of one of the run's own, which is started again."""
        self.loop.kill("worker")
        return True


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
    dice, happened = random.Random(11), Counter[str]()
    settings = ["run.steps=100000", f"run.directory={tmp_path}", "engine.replicas=2", "rollout.lease_s=5"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    with running_loop(tmp_path, "configs/local.yaml", *arguments) as loop, fleet_of(loop) as fleet:
        loop.wait_for(lambda _seen: len(fleet.routable()) == 2, "both engines", START_S)
        began, step = time.monotonic(), loop.wait_for_step(1, START_S).step
        while happened.total() < CHANGES:
            kinds = [
                fleet.worker_joins,
                fleet.worker_leaves,
                fleet.kill_worker,
                fleet.engine_leaves,
                fleet.engine_joins,
            ]
            may_kill = happened["kill_engine"] < KILLS
            change = fleet.kill_engine if may_kill and len(fleet.routable()) == 2 else dice.choice(kinds)
            if change(dice):
                happened[change.__name__] += 1
                step = loop.wait_for_step(step + 1, START_S).step
        if fleet.left is not None:
            fleet.engine_joins(dice)
        seen = loop.wait_for(lambda s: len(fleet.routable()) == 2 and s.step >= 60, "everybody is back", START_S)
        seconds = round(time.monotonic() - began)
        counters, rewards = seen.counters, [record["reward_mean"] for record in loop.metrics()]
        assert all(r.state is EngineState.SERVING for r in fleet.broker.engines())
    first, last = statistics.fmean(rewards[:10]), statistics.fmean(rewards[-10:])
    get_logger().info(
        "fifty changes",
        happened=dict(happened),
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
    assert len(fleet.recoveries) == happened["kill_engine"]
    assert last > first + 0.3, rewards
