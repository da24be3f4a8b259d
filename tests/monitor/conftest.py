"""A run in a real Redis, with groups in every state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.queue import Broker
from broker.types import (
    EngineRecord,
    EngineState,
    Group,
    Outcome,
    Refused,
    Ticket,
    Trajectory,
    VersionRecord,
    VersionRun,
)
from tests.weight_sync.live import config, redis_server

GROUPS_PER_STEP = 16
POLICY = {
    "tokens_per_s": 12345.0,
    "response_length_mean": 811.6,
    "clip_fraction": 0.04,
    "log_ratio_abs_mean": 0.049,
    "kl_behaviour": 1.4e-4,
    "ess": 0.98,
    "entropy": 0.22,
    "grad_norm": 0.14,
}
"""What the last step did to the policy."""
SCORE = {"value": 0.5, "low": 0.4, "high": 0.6}


@dataclass
class Run:
    """A run and its trainer's epoch."""

    broker: Broker
    url: str
    epoch: int
    version: int
    name: str = "test"

    def sample(self, tokens: int = 3, worker: str = "worker-0") -> Ticket:
        """Admit and submit one group, all of whose tokens are of the engine's version."""
        ticket = self.broker.admit(worker, "engine-0")
        assert isinstance(ticket, Ticket), ticket
        trajectory = Trajectory(
            np.arange(2, dtype=np.int32),
            np.arange(tokens, dtype=np.int32),
            np.zeros(tokens, np.float32),
            np.ones(tokens, np.bool_),
            (VersionRun(0, tokens, ticket.engine_version),),
            1.0,
            "stop",
        )
        names = {"run": self.name, "task": "max-digit", "worker": worker, "engine": "engine-0"}
        group = Group(
            group_id=ticket.group_id,
            prompt_index=ticket.prompt_index,
            attempt=ticket.attempt,
            samples_wanted=1,
            generation_seconds=0.1,
            trajectories=(trajectory,),
            **names,
        )
        assert not isinstance(self.broker.submit(group), Refused)
        return ticket

    def step(self, reward: float = 0.5) -> None:
        """Pull a batch and train it."""
        batch = self.broker.pull(self.epoch, self.version, GROUPS_PER_STEP)
        assert not isinstance(batch, Refused), batch
        lags: dict[int, int] = {}
        for delivery in batch:
            lag = self.version - delivery.oldest_version
            lags[lag] = lags.get(lag, 0) + delivery.response_tokens
        metrics = {
            "step": self.version + 1,
            "reward_mean": reward,
            "lag_mean": 0.0,
            "wait_s": 0.6,
            "step_s": 1.0,
            "groups": len(batch),
            "groups_filtered": 0,
            "by_lag": {"0": {"tokens": 1}},
            **POLICY,
        }
        self.broker.step(self.epoch, self.version, [Outcome(d.group_id) for d in batch], lags, metrics)
        self.version += 1


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Two steps trained, 20 groups waiting at lag 2, one generating; engine-0 serves version 0, engine-1 joins."""
    with redis_server(tmp_path) as (url, _server):
        broker = Broker.connect(url, "test", timeout_s=3.0)
        try:
            broker.initialise(config(url, tmp_path))
            epoch = broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
            made = Run(broker, url, epoch, broker.name_version(epoch))
            broker.publish(epoch, VersionRecord(0, 0, "/secret/path/v000000", "c0ffee"))
            broker.register_engine(EngineRecord("engine-0", "http://secret-host:1", EngineState.SERVING, 0))
            broker.register_engine(EngineRecord("engine-1", "http://secret-host:2", EngineState.JOINING))
            broker.heartbeat_worker("worker-0", {"groups": 53})
            for _ in range(2 * GROUPS_PER_STEP + 20):
                made.sample()
            made.step(0.25)
            made.step(0.5)
            assert isinstance(broker.admit("worker-0", "engine-0"), Ticket)
            yield made
        finally:
            broker.close()


def record(version: int, label: str = "aime24", **scores: Any) -> dict[str, Any]:
    """What the evaluator hands in for one task on one version."""
    head = {"task": "math-jsonl", "label": label, "version": version, "step": version, "evaluation_lag": 1}
    return {**head, "time_ms": 5, "prompts": 3, "samples": 8, "missing": 0, **(scores or {"avg@8": SCORE})}


def write_samples(folder: Path) -> None:
    """Three groups for people to read, of versions 0 to 2, as a worker writes them into the run's folder.

    The newest lacks two of its samples; the oldest was written before such were counted."""
    (folder / "samples").mkdir(parents=True)
    lines = [
        {
            "group": 2**60 + at,
            "prompt_index": at,
            "task": "t",
            "version": at,
            "prompt": "<b>1+1</b>",
            "rewards": [1.0, 0.0],
            **({"missing": 2 * (at - 1)} if at else {}),
            "samples": [{"reward": 1.0, "finish": "stop", "tokens": 2, "pieces": [[at, "2"], [None, "?"]]}],
        }
        for at in range(3)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "samples" / "worker-0.jsonl").write_text(text)
