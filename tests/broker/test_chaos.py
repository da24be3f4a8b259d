"""kill -9 of real processes at random instants: nothing acknowledged is lost, trained twice, or beyond the bound."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.queue import Broker
from broker.server import EmbeddedServer
from tests.broker import chaos
from tests.broker.helpers import wait_for
from tests.conftest import RUN, ConfigFactory

CONTEXT = multiprocessing.get_context("fork")  # a killed process is replaced in milliseconds
MAX_LAG = 3


class Processes:
    """Two workers and a trainer; whoever is killed is started again."""

    def __init__(self, url: str, folder: Path) -> None:
        self.targets: dict[str, tuple[Callable[..., None], tuple[object, ...]]] = {
            "worker-0": (chaos.worker, (url, folder, 0)),
            "worker-1": (chaos.worker, (url, folder, 1)),
            "trainer": (chaos.trainer, (url, folder, MAX_LAG)),
        }
        self.running = {name: self._start(name) for name in self.targets}

    def _start(self, name: str) -> multiprocessing.process.BaseProcess:
        target, arguments = self.targets[name]
        process = CONTEXT.Process(target=target, args=arguments, daemon=True)
        process.start()
        return process

    def kill(self, name: str, again: bool = True) -> None:
        process = self.running[name]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        if again:
            self.running[name] = self._start(name)

    def stop(self) -> None:
        for name, process in self.running.items():
            if process.is_alive():
                self.kill(name, again=False)


def trained(folder: Path) -> int:
    file = folder / "checkpoint"
    return int(json.loads(file.read_text())["step"]) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "fsync"),
    [
        pytest.param(20, "always", marks=pytest.mark.timeout(900)),
        pytest.param(250, "always", marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
        pytest.param(250, "everysec", marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_kill_nine_of_anything_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, make_config: ConfigFactory, kills: int, fsync: str
) -> None:
    chance = random.Random(kills)
    server = EmbeddedServer(tmp_path / "redis", password="")
    with server:
        broker = Broker.connect(server.url, RUN, timeout_s=10)
        client = broker._connection.client
        client.config_set("appendfsync", fsync)
        broker.initialise(
            make_config(**{"lag.max": MAX_LAG, "rollout.lease_s": 1.0, "lag.straggler_wait_s": 2.0, "run.steps": 10**6})
        )
        processes, log = Processes(server.url, tmp_path), []
        try:
            for _ in range(kills):
                progress_by = time.monotonic() + chance.uniform(0.05, 0.5)
                wait_for(lambda at=progress_by: time.monotonic() > at, 60)  # type: ignore[misc]
                log.append(chance.choice(["worker-0", "worker-1", "trainer", "trainer", "redis"]))
                if log[-1] == "redis":
                    server.kill()
                    server.start(120)
                    client.config_set("appendfsync", fsync)
                else:
                    processes.kill(log[-1])
            reached = trained(tmp_path)
            wait_for(lambda: trained(tmp_path) >= reached + chaos.SAVE_EVERY, 120)  # it goes on after all that
            (tmp_path / "stop").touch()
            wait_for((tmp_path / "done").exists, 120)
        finally:
            processes.stop()
        check(broker, tmp_path, lost_seconds=fsync != "always")
        broker.close()


def check(broker: Broker, folder: Path, lost_seconds: bool) -> None:
    """What must hold at the end. lost_seconds: Redis may have forgotten what it acknowledged last before a kill."""
    seen, state = broker.snapshot(), json.loads((folder / "checkpoint").read_text())
    history = state["history"]
    ids, prompts = [i for i, _, _ in history], [p for _, p, _ in history]
    assert len(ids) == len(set(ids)), "a group was trained twice"
    assert len(prompts) == len(set(prompts)), "a prompt was trained twice"
    assert all(0 <= lag <= MAX_LAG for _, _, lag in history), "a group was trained beyond the bound"
    assert seen.groups.closes
    assert seen.tokens.closes
    assert seen.step == state["step"]
    dead = {letter["prompt_index"] for letter in broker.dead_letters()}
    assert set(range(state["next"])) <= set(prompts) | set(state["open"]) | dead, "a prompt was lost"
    acknowledged = [int(line) for file in folder.glob("worker-?") for line in file.read_text().split()]
    assert len(acknowledged) >= len(ids) / 2
    waiting = {r.group_id for r in broker.groups("ready", 1000)}
    missing = set(acknowledged) - set(ids) - waiting
    stale = seen.counters.get("stale_at_pull", 0) + seen.counters.get("stale_at_attach", 0)
    if not lost_seconds:
        assert len(missing) <= stale, f"{len(missing)} acknowledged groups are gone, {stale:g} of them as stale"
