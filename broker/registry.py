"""Who serves what: engines, published versions, roles that one process has, and word of every change.

Invariant: a record is written whole by one script, which stamps the server's time; nobody else's fields are lost by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from broker import snapshot as view
from broker.changes import Changes
from broker.handle import RunHandle, reading
from broker.types import EngineRecord, EngineState, VersionRecord


class RegistryCalls(RunHandle):
    """The registry's part of `Broker`."""

    def register_engine(self, record: EngineRecord) -> None:
        """Add an engine, or start its record afresh. The server stamps since_ms and heartbeat_ms."""
        self._call("engine", record.engine_id, view.engine_json(record), "", "register")

    def update_engine(self, record: EngineRecord, expected_state: EngineState | None = None) -> bool:
        """Write an engine's record if it is registered and in `expected_state` (None: any); whether it was written."""
        expected = expected_state.value if expected_state else ""
        return bool(self._call("engine", record.engine_id, view.engine_json(record), expected, "update")[0])

    def heartbeat_engine(self, engine_id: str, staged: int = -1, staged_path: str = "") -> bool:
        """Stamp heartbeat_ms of a registered engine; False if it is not registered.

        staged, staged_path: the version that lies on its host, and where; -1 changes nothing.
        """
        told = msgspec.json.encode({"staged": staged, "staged_path": staged_path}).decode() if staged >= 0 else ""
        return bool(self._call("engine", engine_id, told, "", "heartbeat")[0])

    def remove_engine(self, engine_id: str) -> None:
        """Forget an engine."""
        self._hash("engines", "hdel", engine_id)

    @reading()
    def engines(self) -> tuple[EngineRecord, ...]:
        """All engines, by id."""
        found = cast(dict[bytes, bytes], self._hash("engines", "hgetall"))
        return tuple(view.engine(found[name].decode()) for name in sorted(found))

    def published(self) -> VersionRecord | None:
        """The newest published version, None before the first."""
        return max(self.versions(), key=lambda record: record.version, default=None)

    @reading()
    def versions(self) -> tuple[VersionRecord, ...]:
        """Published versions that were not forgotten, oldest first."""
        found = cast(dict[bytes, bytes], self._hash("versions", "hgetall"))
        return tuple(sorted((view.version(text.decode()) for text in found.values()), key=lambda r: r.version))

    def forget_version(self, version: int) -> None:
        """A version's files are gone."""
        self._hash("versions", "hdel", str(version))

    def hold(self, role: str, holder: str, seconds: float) -> str:
        """Have a role of the run for `seconds`, again to renew, 0 to give it up; whose it is now, "" if nobody's.

        holder: unique to the process. Whoever did not renew in time finds the name of another here, or its own.
        """
        answer = self._call("hold", role, holder, int(seconds * 1000))
        if answer[0] == "other":
            return str(answer[1])
        return holder if seconds else ""

    def pass_rate(self, prompt: str, passes: float = 0, samples: int = 0, keep: float = 1.0) -> tuple[float, float]:
        """Passes and samples of a prompt, of late; samples > 0 adds a group's, and what was known counts `keep` times.

        prompt: a name of fixed length, such as a digest. A million prompts are known at most.
        """
        found = self._call("pass_rate", prompt, passes, samples, keep)
        return float(found[0]), float(found[1])

    def evaluator(self, seconds: float, *, begins: bool = False) -> bool:
        """Say that an evaluator lives for `seconds`; whether an operator asked for an evaluation.

        begins: it takes up the newest version now, so that what was asked for is done.
        """
        return bool(self._call("evaluator", int(seconds * 1000), int(begins), "", "")[0] == "asked")

    def evaluated(self, record: Mapping[str, Any], words: str, seconds: float) -> None:
        """Hand in a result, and say that the evaluator lives for `seconds`. words: the result for the event log."""
        self._call("evaluator", int(seconds * 1000), 0, msgspec.json.encode(record), words)

    def listen(self, heard: Callable[[str], None]) -> Changes:
        """Call `heard`, in another thread, when a version is published or an engine changes; see broker/changes.py."""
        return Changes(self._connection, self._keys.named("changes"), heard)
