"""What weight-sync needs of the broker, so that its loop can be read, and tested, without Redis."""

from __future__ import annotations

from typing import Protocol

from broker.types import EngineRecord, EngineState, VersionRecord


class Registry(Protocol):
    """The registry of engines and versions. Every method raises BrokerError if the store does not answer."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """All registered engines."""

    def published(self) -> VersionRecord | None:
        """The newest published version."""

    def versions(self) -> tuple[VersionRecord, ...]:
        """All versions that are still known."""

    def update_engine(self, record: EngineRecord, expected_state: EngineState) -> bool:
        """Replace an engine's record if its state is `expected_state`; False, and no change, if it is not."""
