"""`lagrange trainer` with the real model: Megatron-core on CPU, real Redis, made-up rollouts with routing traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.queue import Broker
from broker.types import EngineRecord, EngineState, Group, Refused, Ticket, Trajectory, VersionRun
from configs.load import save_config
from configs.schema import RunConfig, TinyModel
from services.local.tiny_model import write_tiny_model
from tests.conftest import ConfigFactory
from trainer.launch import STOPPED

pytestmark = pytest.mark.megatron

TINY = TinyModel(layers=2, hidden=32, heads=2, key_value_heads=2, head_dim=16, expert_hidden=16)


class Feeder:
    """Engine, weight-sync and worker at once: random tokens and random routes under the newest version."""

    def __init__(self, broker: Broker, config: RunConfig) -> None:
        self.broker, self.config = broker, config
        self.random = np.random.default_rng(0)
        self.version = -1
        self.errors: list[BaseException] = []
        broker.register_engine(EngineRecord("e", "http://e", EngineState.JOINING))

    def feed(self) -> None:
        record = self.broker.published()
        if record is not None and record.version != self.version:
            self.version = record.version
            self.broker.update_engine(EngineRecord("e", "http://e", EngineState.SERVING, self.version))
        ticket = self.broker.admit("w", "e")
        if isinstance(ticket, Refused):
            time.sleep(0.02)
        else:
            self.broker.submit(self.group(ticket))

    def group(self, ticket: Ticket) -> Group:
        members = tuple(self.sample() for _ in range(self.config.rollout.samples_per_prompt))
        return Group(
            run=self.config.run.id,
            group_id=ticket.group_id,
            prompt_index=ticket.prompt_index,
            attempt=0,
            task="t",
            worker="w",
            engine="e",
            samples_wanted=len(members),
            generation_seconds=0.0,
            trajectories=members,
        )

    def sample(self) -> Trajectory:
        prompt, response = self.random.integers(1, 5), self.random.integers(1, 5)
        tokens = int(prompt + response)
        order = self.random.permuted(np.tile(np.arange(8, dtype=np.uint8), ((tokens - 1) * TINY.layers, 1)), axis=1)
        return Trajectory(
            prompt_ids=self.random.integers(0, 10, prompt).astype(np.int32),
            response_ids=self.random.integers(0, 10, response).astype(np.int32),
            log_probs=np.full(response, -2.0, np.float32),
            loss_mask=np.ones(response, np.bool_),
            versions=(VersionRun(0, int(response), self.version),),
            reward=float(self.random.integers(0, 2)),
            finish="stop",
            routes=np.ascontiguousarray(order[:, :2]).reshape(tokens - 1, TINY.layers, 2),
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()

        def work() -> None:
            try:
                while not ended.is_set():
                    self.feed()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(20)
        assert not self.errors


Starter = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    started: list[subprocess.Popen[bytes]] = []

    def launch(config: RunConfig) -> subprocess.Popen[bytes]:
        file = tmp_path / "config.yaml"
        save_config(config, file)
        log = (tmp_path / f"trainer-{len(started)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services", "trainer", "--config", str(file)],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def prepare(make_config: ConfigFactory, redis_url: str, tmp_path: Path, **more: Any) -> tuple[RunConfig, Broker]:
    folder = tmp_path / "model"
    write_tiny_model(TINY, 0, folder)
    config = make_config(
        **{
            "run.steps": 6,
            "model": {"path": folder},
            "redis.url": redis_url,
            "trainer.checkpoint": {"interval_steps": 2},
            **more,
        }
    )
    broker = Broker.connect(redis_url, config.run.id, timeout_s=5)
    broker.initialise(config)
    return config, broker


def explain(tmp_path: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("trainer-*.log")))


def records(config: RunConfig) -> list[dict[str, Any]]:
    file = config.run.folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_two_ranks_train_a_run_to_its_end(
    make_config: ConfigFactory, redis_url: str, tmp_path: Path, start: Starter
) -> None:
    config, broker = prepare(make_config, redis_url, tmp_path, **{"trainer.layout": {"data": 2}})
    with Feeder(broker, config).running():
        assert start(config).wait(100) == 0, explain(tmp_path)
    seen = broker.snapshot()
    assert (seen.status, seen.step, seen.durable_step) == ("finished", 6, 6)
    assert seen.groups.closes
    found = records(config)
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5, 6]
    assert all(0 < r["replay_overlap"] < 1 for r in found)
    assert all(r["grad_norm"] > 0 for r in found if r["groups_filtered"] < 2)
    assert (config.run.folder / "model-final" / "model.safetensors").exists()
    broker.close()


def test_a_trainer_that_is_ended_and_then_killed_resumes_each_time_and_trains_nothing_twice(
    make_config: ConfigFactory, redis_url: str, tmp_path: Path, start: Starter
) -> None:
    config, broker = prepare(make_config, redis_url, tmp_path, **{"run.steps": 10})

    def run_until(step: int) -> subprocess.Popen[bytes]:
        process = start(config)
        deadline = time.monotonic() + 90
        while len(records(config)) < step:
            assert process.poll() is None, explain(tmp_path)
            assert time.monotonic() < deadline, explain(tmp_path)
            time.sleep(0.02)
        return process

    with Feeder(broker, config).running():
        asked = run_until(3)
        asked.send_signal(signal.SIGTERM)
        assert asked.wait(30) == STOPPED, explain(tmp_path)
        stopped_at = broker.snapshot().step
        assert broker.snapshot().durable_step == stopped_at  # everything was written before it ended
        killed = run_until(stopped_at + 3)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(20) == -signal.SIGKILL
        assert start(config).wait(100) == 0, explain(tmp_path)
    seen = broker.snapshot()
    assert (seen.status, seen.step, seen.durable_step) == ("finished", 10, 10)
    assert seen.groups.closes
    assert seen.tokens.closes
    assert seen.groups.trained + seen.groups.filtered == 20
    assert [r["step"] for r in records(config)] == list(range(1, 11))
    broker.close()
