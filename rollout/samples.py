"""Some trajectories for people to read: runs/<id>/samples/<worker>.jsonl.

Invariant: bounded in time (PER_VERSION groups of each version), in width (SAMPLES samples of TEXT characters) and on
disk (two files of KEPT groups).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.traces import trace_id
from broker.types import Group, Trajectory
from rollout.codec import Codec

PER_VERSION = 2
SAMPLES = 4
TEXT = 4000
KEPT = 200


class SampleLog:
    """Writes a few groups of each version."""

    def __init__(self, path: Path, codec: Codec) -> None:
        """path: the file, whose folder need not exist."""
        self._path, self._codec = path, codec
        self._version, self._written = -1, 0
        self._lines = -1  # of the file; -1: not looked at yet

    def note(self, group: Group, newest: int = -1) -> bool:
        """Write the group if its version has not had its share; whether it was written. Raises OSError.

        newest: version that engines serve by now; -1: unknown.
        """
        version = group.oldest_version if group.oldest_version is not None else -1
        if version < self._version or (version == self._version and self._written >= PER_VERSION):
            return False
        if version > self._version:
            self._version, self._written = version, 0
        self._written += 1
        lag = {"lag": newest - version} if newest >= version >= 0 else {}
        self._write(json.dumps(readable(group, self._codec) | lag, ensure_ascii=False))
        return True

    def _write(self, line: str) -> None:
        if self._lines < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = _lines_of(self._path)  # the worker of this number before us may have left some
        if self._lines >= KEPT:
            self._path.replace(self._path.with_suffix(".1.jsonl"))
            self._lines = 0
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._lines += 1


def readable(group: Group, codec: Codec) -> dict[str, Any]:
    """A group as plain data: its prompt, and of each sample the reward and its pieces, [version or null, text].

    null: tokens of an environment. missing: samples left out of the group, without an answer or a reward. What is
    written down also has `lag`: behind the newest version served by then.
    """
    first = group.trajectories[0]
    return {
        "group": group.group_id,
        "prompt_index": group.prompt_index,
        "trace": trace_id(group.trace),
        "task": group.task,
        "version": group.oldest_version,
        "prompt": codec.decode(first.prompt_ids.tolist())[-TEXT:],
        "rewards": [t.reward for t in group.trajectories],
        "missing": group.samples_wanted - len(group.trajectories),
        "samples": [
            {"reward": t.reward, "finish": t.finish, "tokens": len(t.response_ids), "pieces": _pieces(t, codec)}
            for t in group.trajectories[:SAMPLES]
        ],
    }


def read_samples(folder: Path, groups: int) -> tuple[dict[str, Any], ...]:
    """The last `groups` groups of all files in a run's folder, by version; unreadable lines are passed over."""
    kept: deque[dict[str, Any]] = deque(maxlen=4 * KEPT)
    for path in sorted((folder / "samples").glob("*.jsonl")):
        kept.extend(_records(path))
    ordered = sorted(kept, key=lambda record: (record.get("version") or 0, record.get("group") or 0))
    return tuple(ordered[-groups:])


def _lines_of(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # the last line of a worker that was killed
                continue
            if isinstance(record, dict) and isinstance(record.get("samples"), list):
                yield record


def _pieces(t: Trajectory, codec: Codec) -> list[tuple[int | None, str]]:
    versions, ids = t.token_versions().tolist(), t.response_ids.tolist()
    pieces: list[tuple[int | None, str]] = []
    start, room = 0, TEXT
    names = [version if mask else None for version, mask in zip(versions, t.loss_mask.tolist(), strict=True)]
    for at in range(1, len(ids) + 1):
        if at == len(ids) or names[at] != names[start]:
            text = codec.decode(ids[start:at])[:room]
            pieces.append((names[start], text))
            start, room = at, room - len(text)
    return pieces
