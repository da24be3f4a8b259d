"""Small groups, and a run whose trainer has attached and published its first version."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from broker.queue import Broker
from broker.types import (
    Delivery,
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

WORKER, ENGINE = "worker-1", "engine-1"


def trajectory(version: int, response: int = 4, routes: bool = True, trainable: bool = True) -> Trajectory:
    """Three prompt tokens, `response` response tokens, all of one version."""
    return Trajectory(
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(response, dtype=np.int32),
        log_probs=np.linspace(-1, 0, response, dtype=np.float32),
        loss_mask=np.full(response, trainable),
        versions=(VersionRun(0, response, version),),
        reward=1.0,
        finish="stop",
        routes=np.zeros((2 + response, 2, 2), np.uint8) if routes else None,
    )


def finished(
    ticket: Ticket,
    run: str,
    version: int | None = None,
    *,
    worker: str = WORKER,
    response: int = 4,
    trainable: bool = True,
) -> Group:
    """The group that a ticket asks for: two samples, tokens of `version` (default: the ticket's)."""
    at = ticket.engine_version if version is None else version
    return Group(
        run=run,
        group_id=ticket.group_id,
        prompt_index=ticket.prompt_index,
        attempt=ticket.attempt,
        task="test",
        worker=worker,
        engine=ENGINE,
        samples_wanted=2,
        generation_seconds=0.5,
        trajectories=(trajectory(at, response, trainable=trainable),) * 2,
    )


@dataclass
class Run:
    """A broker with a trainer's epoch and version, and shorthands for what workers and trainer do."""

    broker: Broker
    epoch: int = -1
    version: int = -1

    def start(self) -> Run:
        """Attach, name and publish version 0, and register an engine that serves it."""
        self.epoch = self.broker.attach_trainer(checkpoint_step=0, checkpoint_version=-1).epoch
        self.version = self.broker.name_version(self.epoch)
        self.publish()
        return self

    def publish(self) -> None:
        """Publish the current version and let the engine serve it."""
        self.broker.publish(self.epoch, VersionRecord(self.version, 0, "weights", "sum"))
        self.broker.register_engine(EngineRecord(ENGINE, "http://engine", EngineState.SERVING, self.version))

    def admit(self, worker: str = WORKER) -> Ticket:
        """A ticket; the admission must succeed."""
        answer = self.broker.admit(worker, ENGINE)
        assert isinstance(answer, Ticket), answer
        return answer

    def ready(self, groups: int = 1) -> list[Ticket]:
        """Admit and submit groups."""
        tickets = [self.admit() for _ in range(groups)]
        for ticket in tickets:
            assert self.broker.submit(finished(ticket, self.broker.run_id)) == "accepted"
        return tickets

    def pull(self, groups: int = 2) -> tuple[Delivery, ...]:
        """A batch; the pull must succeed."""
        answer = self.broker.pull(self.epoch, self.version, groups)
        assert not isinstance(answer, Refused), answer
        return answer

    def step(self, batch: Sequence[Delivery]) -> None:
        """Train a batch."""
        lags: dict[int, int] = {}
        for d in batch:
            lag = self.version - d.oldest_version
            lags[lag] = lags.get(lag, 0) + d.response_tokens
        self.broker.step(self.epoch, self.version, [Outcome(d.group_id) for d in batch], lags, {"loss": 0.5})
        self.version += 1

    def train(self, groups: int = 2) -> tuple[Delivery, ...]:
        """Generate, pull, step and publish one batch."""
        self.ready(groups)
        batch = self.pull(groups)
        self.step(batch)
        self.publish()
        return batch

    def set_clock(self, seconds: int) -> None:
        """Set the server's clock forward, or back if negative, as the scripts see it."""
        self.broker._connection.client.hincrby(self.broker._keys.policy, "clock_shift_ms", 1000 * seconds)

    def counter(self, name: str) -> float:
        """A running total by its name."""
        return self.broker.snapshot().counters.get(name, 0)

    def assert_closed(self) -> None:
        """The ledger closes in groups and in tokens."""
        seen = self.broker.snapshot()
        assert seen.groups.closes, seen.groups
        assert seen.tokens.closes, seen.tokens


def reason(answer: object) -> str:
    """Why the broker refused; it must have."""
    assert isinstance(answer, Refused), answer
    assert answer.detail
    return answer.reason


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.005)
