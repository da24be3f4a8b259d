"""What weight-sync needs of the broker, so that its loop can be read, and tested, without Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from broker.changes import Changes
from broker.types import EngineRecord, EngineState, VersionRecord


class Registry(Protocol):
    """The registry of engines and versions. Every method raises BrokerError if the store does not answer."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """All registered engines."""

    def published(self) -> VersionRecord | None:
        """The newest published version."""

    def versions(self) -> tuple[VersionRecord, ...]:
        """All versions that are still known."""

    def register_engine(self, record: EngineRecord) -> None:
        """Enter an engine, or start its record afresh."""

    def update_engine(self, record: EngineRecord, expected_state: EngineState | None) -> bool:
        """Replace an engine's record if its state is `expected_state` (None: any); False, and no change, if not."""

    def remove_engine(self, engine_id: str) -> None:
        """Forget an engine."""

    def hold(self, role: str, holder: str, seconds: float) -> str:
        """Have a role of the run for `seconds` (0: give it up); whose it is now."""

    def server_time_ms(self) -> int:
        """The store's clock, in milliseconds since 1970."""

    def listen(self, heard: Callable[[str], None]) -> Changes:
        """Call `heard`, in another thread, with each change of versions and engines."""
