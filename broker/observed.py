"""What a run looks like from outside: the ledger, its groups, and all that a page shows at one instant.

Invariant: plain values, read in one atomic script each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from broker.answers import EngineRecord, VersionRecord

PAST_THE_END_MS = "past_the_end_ms"
"""In a worker's heartbeat: when, in ms of the server's clock, it last got a prompt past the end of its data set."""
NEWEST = "_newest"
"""In a worker's heartbeat, after the name of a count of failures: what the newest of them said."""


class GroupState(StrEnum):
    """Where a group is. `issued = generating + ready + leased + trained + filtered + stale + failed` at any instant."""

    GENERATING = "generating"  # admitted; a rollout worker holds a lease
    READY = "ready"  # submitted; waits in the queue
    LEASED = "leased"  # pulled by the trainer for the step that it is computing
    TRAINED = "trained"  # part of an optimizer step; `durable` once the checkpoint that holds the step is
    FILTERED = "filtered"  # consumed by a step without a gradient (all rewards equal)
    STALE = "stale"  # dropped: its oldest token would have exceeded the bound
    FAILED = "failed"  # dropped: too few samples, a lease that expired, a payload that cannot be read


ListedState = Literal["generating", "ready", "leased", "trained"]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The record of a group that is not closed, as `lagrange groups` shows it. Times in ms of the server's clock; -1 or
    0 where it did not get there yet. admitted_version: of its engine at admission. blob: its file in a payload folder.
    """

    group_id: int
    state: GroupState
    prompt_index: int
    attempt: int
    worker: str
    engine: str
    admitted_version: int
    issued_ms: int
    oldest_version: int = -1
    samples: int = 0
    response_tokens: int = 0
    total_tokens: int = 0
    payload_bytes: int = 0
    submitted_ms: int = 0
    pulled_ms: int = 0
    step: int = 0
    trained_at: int = -1
    blob: str = ""


@dataclass(frozen=True, slots=True)
class LagCount:
    """Groups and trainable tokens at one lag."""

    groups: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """The ledger at one instant, in groups and in trainable tokens."""

    issued: int = 0
    generating: int = 0
    ready: int = 0
    leased: int = 0
    trained: int = 0
    durable: int = 0  # part of trained + filtered
    filtered: int = 0
    stale: int = 0
    failed: int = 0

    @property
    def missing(self) -> int:
        """What was issued and is nowhere; 0 is invariant 3 (no tokens are generating: they are issued when submitted
        or reported)."""
        placed: int = sum(getattr(self, place) for place in PLACES)
        return self.issued - placed

    @property
    def closes(self) -> bool:
        """Invariant 3."""
        return self.missing == 0


PLACES = ("trained", "filtered", "stale", "failed", "leased", "ready", "generating")
"""Fields of a Tally: where a group or token is that was issued. It is in one of them."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event log."""

    time_ms: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A prompt that was given up."""

    group_id: int
    prompt_index: int
    attempt: int
    reason: str
    worker: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Time in queue of the groups that wait now, in ms; percentiles by nearest rank."""

    groups: int
    min_ms: int
    mean_ms: float
    p50_ms: int
    p95_ms: int
    max_ms: int


@dataclass(frozen=True, slots=True)
class Waited:
    """Time in queue of groups that were trained or filtered in the surviving history.

    total_ms: added up. groups: upper end of a bucket, in ms -> how many."""

    total_ms: int
    groups: dict[int, int]


@dataclass(frozen=True, slots=True)
class Detail:
    """What only a page asks for. by: (waiting or trained, dimension, name) -> oldest version (waiting) or lag -> count.

    waited: time in queue of all that was trained. waiting: of all that waits, None if nothing does. waited_by,
    waiting_by: the same by dimension and name, of the names that have any. events, dead: newest first.
    lag_changed_step: step at which max_lag was changed last, -1: never. evaluations: results, newest first
    (rollout/evaluation/run.py).
    """

    by: dict[tuple[str, str, str], dict[int, LagCount]]
    waited: Waited
    waiting: Waiting | None
    waited_by: dict[tuple[str, str], Waited]
    waiting_by: dict[tuple[str, str], Waiting]
    events: tuple[Event, ...]
    dead: tuple[DeadLetter, ...]
    lag_changed_step: int = -1
    checkpoint_asked: bool = False
    evaluations: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a page shows together, read in one atomic script at server time `time_ms`.

    ready_by_version: oldest version -> what waits. trained_by_lag: lag -> what was trained in the surviving history.
    waiting_ms: time in queue of the groups that wait now (min, mean, max); trained_waiting_ms: of those trained so
    far (mean). pull_max_lag: the bound under which the last batch was pulled, -1: none yet. counters: running totals by
    name (docs/how-the-guarantees-work.md lists them). metrics: the trainer's last step record. detail: only if it was
    asked for.
    """

    time_ms: int
    run: str
    status: str  # "starting", "running", "draining", "finished", "stopped"
    max_lag: int
    groups_per_step: int
    publish_interval: int
    version: int
    published: int
    highest_version: int
    step: int
    durable_step: int
    steps_total: int
    epoch: int
    admission_paused: bool
    groups: Tally
    tokens: Tally
    payload_bytes: int
    ready_by_version: dict[int, LagCount] = field(default_factory=dict)
    trained_by_lag: dict[int, LagCount] = field(default_factory=dict)
    oldest_ready_ms: int = 0
    mean_ready_ms: float = 0.0
    mean_trained_wait_ms: float = 0.0
    engines: tuple[EngineRecord, ...] = ()
    workers: dict[str, dict[str, float | int | str]] = field(default_factory=dict)
    versions: tuple[VersionRecord, ...] = ()
    pull_max_lag: int = -1
    counters: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, object] = field(default_factory=dict)
    dead_letters: int = 0
    detail: Detail | None = None
