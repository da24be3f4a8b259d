"""Looking at a run: snapshots, groups, dead letters, and what was logged.

Invariant: nothing here changes a run, but for `requeue`.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from broker import snapshot as view
from broker.handle import RunHandle, reading
from broker.types import GroupRecord, ListedState, Snapshot, Steered


class WatchCalls(RunHandle):
    """The part of `Broker` that people and the monitor use."""

    @reading()
    def snapshot(self, detail: int = 0, *, names: bool = False) -> Snapshot:
        """Everything at one instant. detail: that many events and dead letters, 0: neither. names: lag by name, too."""
        return view.parse(self._call("snapshot", detail, int(names)))

    @reading()
    def dead_letters(self) -> list[dict[str, Any]]:
        """Prompts that were given up, newest last: group_id, prompt_index, attempt, reason, worker, time_ms."""
        found = cast(dict[bytes, bytes], self._hash("dead", "hgetall"))
        return sorted((msgspec.json.decode(text) for text in found.values()), key=lambda letter: letter["time_ms"])

    def requeue(self, prompt_index: int, *, why: str = "by hand") -> Steered:
        """Issue the prompt of a dead letter again, with all its tries; refused if it is none. why: for the log."""
        return view.steered(self._call("requeue", prompt_index, why))

    @reading()
    def groups(self, state: ListedState, limit: int = 100) -> list[GroupRecord]:
        """Groups that are not closed, the first to be used or lost first. `trained`: not yet durable, with filtered."""
        return [view.group_record(item) for item in self._call("groups", state, limit)]

    @reading()
    def group(self, group_id: int) -> GroupRecord | None:
        """One group, None if it is closed (or never was)."""
        found = self._call("groups", "id", group_id)
        return view.group_record(found[0]) if found else None

    @reading()
    def events(self, limit: int = 100) -> list[dict[str, Any]]:
        """The newest events first: time_ms, kind, text. The last 1000 are kept."""
        return [msgspec.json.decode(text) for text in self._newest("events", limit)]

    @reading()
    def evaluations(self, limit: int = 100) -> list[dict[str, Any]]:
        """The newest results first. The last 1000 are kept."""
        return [msgspec.json.decode(text) for text in self._newest("evaluations", limit)]

    @reading()
    def metrics_history(self, limit: int = 1000) -> list[dict[str, Any]]:
        """Metrics of the newest steps first. The last 1000 are kept."""
        return [msgspec.json.decode(text) for text in self._newest("metrics", limit)]

    def server_time_ms(self) -> int:
        """The server's clock, in milliseconds since 1970."""
        seconds, micros = self._connection.attempt(self._connection.client.time)
        return int(seconds) * 1000 + int(micros) // 1000
