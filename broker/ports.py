"""What a rollout worker and a trainer need of the queue, as ports: `Broker` fulfils both, tests may hand in fakes.

Invariant: signatures and answers are those of broker.queue.Broker; mypy holds them together in the last lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from broker.types import (
    Delivery,
    EngineRecord,
    Group,
    Outcome,
    PromptCursor,
    Refused,
    Ticket,
    TrainerState,
    VersionRecord,
)

if TYPE_CHECKING:
    from broker.queue import Broker


class WorkerQueue(Protocol):
    """The rollout worker's side."""

    def admit(self, worker: str, engine_id: str) -> Ticket | Refused: ...

    def submit(self, group: Group, *, stats: Mapping[str, float] | None = None) -> Literal["accepted"] | Refused: ...

    def fail(self, group_id: int, worker: str, reason: str, tokens: int = 0, final: bool = False) -> bool: ...

    def release(self, group_id: int, worker: str) -> bool: ...

    def renew(self, worker: str, group_ids: Sequence[int]) -> tuple[int, ...]: ...

    def heartbeat_worker(self, worker: str, stats: Mapping[str, float | int | str]) -> None: ...

    def engines(self) -> tuple[EngineRecord, ...]: ...


class TrainerQueue(Protocol):
    """The trainer's side; every method may raise Fenced."""

    def attach_trainer(
        self,
        *,
        checkpoint_step: int,
        checkpoint_version: int,
        consumed: Sequence[int] = (),
        cursor: PromptCursor | None = None,
    ) -> TrainerState: ...

    def pull(self, epoch: int, version: int, groups: int) -> tuple[Delivery, ...] | Refused: ...

    def fetch(self, group_ids: Sequence[int]) -> list[Group]: ...

    def reject(self, epoch: int, group_id: int, reason: str) -> bool: ...

    def step(
        self,
        epoch: int,
        version: int,
        outcomes: Sequence[Outcome],
        lag_tokens: Mapping[int, int],
        metrics: Mapping[str, object],
    ) -> PromptCursor: ...

    def commit(self, epoch: int, step: int) -> int: ...

    def name_version(self, epoch: int) -> int: ...

    def publish(self, epoch: int, record: VersionRecord) -> None: ...

    def renew_trainer(self, epoch: int) -> None: ...

    def return_leased(self, epoch: int) -> int: ...


def _fulfilled(broker: Broker) -> tuple[WorkerQueue, TrainerQueue]:
    return broker, broker
