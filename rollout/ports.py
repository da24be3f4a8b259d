"""What rollouts need of the broker, so that they can be tested without one.

Invariant: `broker.queue.Broker` fits both protocols. Its calls block for at most redis.timeout_s and raise
`BrokerUnavailable` when Redis does not answer; what was asked may then have happened or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from broker.changes import Changes
from broker.types import EngineRecord, EngineState, Group, Refused, Ticket, VersionRecord

LEFT = "left the fleet"  # detail of an engine that is gone because somebody asked for it; nobody drives it any more


class RolloutBroker(Protocol):
    """The broker as a rollout worker sees it."""

    def admit(self, worker: str, engine_id: str) -> Ticket | Refused:
        """Leave to generate one group on an engine."""

    def submit(self, group: Group, *, stats: Mapping[str, float] = ...) -> object:
        """Hand in a group; a Refused says why it did not enter the queue."""

    def fail(self, group_id: int, worker: str, reason: str, tokens: int = 0, final: bool = False) -> bool:
        """Give a group up; its prompt is issued again unless final."""

    def drop(self, group_id: int, worker: str, tokens: int = 0) -> bool:
        """The group has no gradient: it is filtered, and its prompt done with."""

    def renew(self, worker: str, group_ids: Sequence[int]) -> tuple[int, ...]:
        """Prolong leases; the ids that are still this worker's."""

    def pass_rate(self, prompt: str, passes: float = 0, samples: int = 0, keep: float = 1.0) -> tuple[float, float]:
        """Passes and samples of a prompt, of late, with those of a group added."""

    def release(self, group_id: int, worker: str, tokens: int = 0) -> bool:
        """Hand a ticket back; its prompt is issued again and no try is counted. tokens: generated for nothing."""

    def heartbeat_worker(self, worker: str, stats: Mapping[str, float | int | str]) -> None:
        """Say that the worker lives, and what it counted so far."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """All registered engines."""

    def listen(self, heard: Callable[[str], None]) -> Changes:
        """Call `heard`, in another thread, when a version is published or an engine changes."""


class EngineRegistry(Protocol):
    """The broker as an engine's supervisor sees it."""

    def register_engine(self, record: EngineRecord) -> None:
        """Enter an engine, or replace what was known of one with the same id."""

    def update_engine(self, record: EngineRecord, expected_state: EngineState | None = None) -> bool:
        """Change an engine's record if it is still in the expected state."""

    def heartbeat_engine(self, engine_id: str, staged: int = -1, staged_path: str = "") -> bool:
        """Say that an engine's supervisor lives, and which version lies on its host, and where (-1: none); False if the
        engine is not registered."""

    def published(self) -> VersionRecord | None:
        """The newest published version."""

    def listen(self, heard: Callable[[str], None]) -> Changes:
        """Call `heard`, in another thread, when a version is published or an engine changes."""

    def remove_engine(self, engine_id: str) -> None:
        """Forget an engine."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """All registered engines."""
