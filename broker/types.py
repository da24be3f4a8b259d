"""The words of the system as types, without I/O (DESIGN.md, "Words").

Invariant: a `Trajectory` or `Group` that passed `check_trajectory`/`check_group` is complete: lengths agree, every
response token has exactly one version, and a routing trace has one row for each token but the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
RouteArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class GroupState(StrEnum):
    """Where a group is. `issued = generating + ready + leased + trained + filtered + stale + failed` at any instant."""

    GENERATING = "generating"  # admitted; a rollout worker holds a lease
    READY = "ready"  # submitted; waits in the queue
    LEASED = "leased"  # pulled by the trainer for the step that it is computing
    TRAINED = "trained"  # part of an optimizer step; `durable` once the checkpoint that holds the step is
    FILTERED = "filtered"  # consumed by a step without a gradient (all rewards equal)
    STALE = "stale"  # dropped: its oldest token would have exceeded the bound
    FAILED = "failed"  # dropped: too few samples, a lease that expired, a payload that cannot be read


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Response tokens [start, start + length) were sampled by `version`."""

    start: int
    length: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sample: a prompt, a response, and what the engine said about each response token.

    prompt_ids: int32 [prompt]. response_ids: int32 [response]. log_probs: float32 [response], the engine's own,
    natural log, at the sampling temperature. loss_mask: bool [response], False where a token is not trained.
    versions: runs that cover the response without gap or overlap, versions never falling. routes: uint8 or uint16
    [prompt + response - 1, layers, top_k], expert ids by falling router weight, of the forward pass that produced the
    next token's log-prob; None for a dense model. reward: finite. finish: "stop", "length" or "abort".
    """

    prompt_ids: Int32Array
    response_ids: Int32Array
    log_probs: Float32Array
    loss_mask: BoolArray
    versions: tuple[VersionRun, ...]
    reward: float
    finish: str
    routes: RouteArray | None = None

    @property
    def tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def oldest_version(self) -> int | None:
        """Smallest version over the trainable tokens; None if no token is trainable."""
        if len(self.versions) == 1:  # no slice: this is asked of every sample
            return self.versions[0].version if self.loss_mask.any() else None
        oldest = [run.version for run in self.versions if self.loss_mask[run.start : run.start + run.length].any()]
        return min(oldest, default=None)

    def token_versions(self) -> Int32Array:
        """int32 [response]: the version of each response token."""
        out = np.zeros(len(self.response_ids), np.int32)
        for run in self.versions:
            out[run.start : run.start + run.length] = run.version
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one prompt: the unit of submission, training and accounting.

    run, group_id, prompt_index, attempt: from the `Ticket` that admission gave. task, engine, worker: names, for
    accounting. samples_wanted: size that the group was admitted with; len(trajectories) may be smaller.
    generation_seconds: from admission to submission.
    """

    run: str
    group_id: int
    prompt_index: int
    attempt: int
    task: str
    worker: str
    engine: str
    samples_wanted: int
    generation_seconds: float
    trajectories: tuple[Trajectory, ...]

    @property
    def response_tokens(self) -> int:
        """Trainable response tokens over all trajectories: the unit of the token ledger."""
        return sum(int(np.count_nonzero(t.loss_mask)) for t in self.trajectories)

    @property
    def oldest_version(self) -> int | None:
        """Smallest version over all trainable tokens; None if none is trainable."""
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)


class InvalidTrajectory(ValueError):
    """A trajectory or group whose parts contradict each other."""


def check_trajectory(t: Trajectory) -> None:
    """Raise InvalidTrajectory unless lengths, dtypes, versions and routes agree (see the class)."""
    n = len(t.response_ids)
    for name, array, dtype in (
        ("prompt_ids", t.prompt_ids, np.int32),
        ("response_ids", t.response_ids, np.int32),
        ("log_probs", t.log_probs, np.float32),
        ("loss_mask", t.loss_mask, np.bool_),
    ):
        if array.dtype != dtype or array.ndim != 1:
            raise InvalidTrajectory(
                f"{name} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)} of one dimension"
            )
    if not len(t.prompt_ids) or not n:
        raise InvalidTrajectory("prompt and response need at least one token each")
    for name, array in (("log_probs", t.log_probs), ("loss_mask", t.loss_mask)):
        if len(array) != n:
            raise InvalidTrajectory(f"{name} has {len(array)} entries for {n} response tokens")
    if not np.isfinite(t.reward):
        raise InvalidTrajectory(f"reward is {t.reward}")
    at, last = 0, -1
    for run in t.versions:
        if run.start != at or run.length < 1 or run.version < 0 or run.version < last:
            raise InvalidTrajectory(f"version run {run} does not continue {at} tokens of version {last}")
        at, last = at + run.length, run.version
    if at != n:
        raise InvalidTrajectory(f"version runs cover {at} of {n} response tokens")
    if t.routes is not None:
        if t.routes.dtype not in (np.uint8, np.uint16) or t.routes.ndim != 3:
            raise InvalidTrajectory(
                f"routes are {t.routes.dtype}{list(t.routes.shape)}, expected uint8 or uint16 [tokens - 1, layers, "
                f"top_k]"
            )
        if t.routes.shape[0] != t.tokens - 1:
            raise InvalidTrajectory(
                f"routes have {t.routes.shape[0]} rows for {t.tokens} tokens, expected {t.tokens - 1}"
            )


def check_group(group: Group) -> None:
    """Raise InvalidTrajectory unless the group has at least one trajectory and each of them is sound."""
    if not group.trajectories:
        raise InvalidTrajectory("a group needs at least one trajectory")
    for index, trajectory in enumerate(group.trajectories):
        try:
            check_trajectory(trajectory)
        except InvalidTrajectory as error:
            raise InvalidTrajectory(f"group {group.group_id}, trajectory {index}: {error}") from error


# --- what the broker answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to generate one group. lease_deadline_ms: server time. engine_version: what the engine served at
    admission.
    """

    group_id: int
    prompt_index: int
    attempt: int
    engine_version: int
    lease_deadline_ms: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Why an operation was not carried out: a stable reason word, and a sentence with the figures.

    Reasons of admit: bound (too many groups in flight for the bound), engine (not routable), memory (byte limit),
    paused, finished, no-trainer (no version is published yet). Of submit: closed (the group is no longer this
    worker's: duplicate or expired lease), stale, memory. Of pull: starved (fewer ready groups than asked), straggler
    (a group still generating would go stale by this step). Of trainer operations: fenced (a newer epoch exists),
    version (the step does not continue the recorded version).
    """

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A group leased to the trainer, by metadata only; `Broker.fetch` brings its payload."""

    group_id: int
    prompt_index: int
    attempt: int
    oldest_version: int
    samples: int
    response_tokens: int
    total_tokens: int
    payload_bytes: int
    submitted_ms: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did with one group: trained, or filtered (no gradient, all rewards equal)."""

    group_id: int
    filtered: bool = False


@dataclass(frozen=True, slots=True)
class PromptCursor:
    """The trained frontier: prompts below `next_index` were issued; those in `open` are not yet trained or given up."""

    next_index: int = 0
    open: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the broker knows of training when a trainer attaches.

    epoch: the attaching trainer's fencing token. highest_version: largest version ever named; a restored trainer goes
    on at highest_version + 1. step: optimizer steps in the surviving history. returned: groups put back into the
    queue.
    """

    epoch: int
    highest_version: int
    step: int
    returned: int


class EngineState(StrEnum):
    """Life cycle of an engine; only SERVING is routable."""

    JOINING = "joining"
    LOADING = "loading"
    VERIFYING = "verifying"
    SERVING = "serving"
    PAUSING = "pausing"
    UPDATING = "updating"
    QUARANTINED = "quarantined"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine in the registry. version: the last confirmed one, -1 if none. since_ms: server time of the last
    change. staged, staged_path: the version whose files its supervisor has on the engine's host, and where; -1: none.
    """

    engine_id: str
    url: str
    state: EngineState
    version: int = -1
    checksum: str = ""
    detail: str = ""
    pid: int = 0
    since_ms: int = 0
    heartbeat_ms: int = 0
    staged: int = -1
    staged_path: str = ""

    @property
    def routable(self) -> bool:
        """Whether new groups may be sent to it."""
        return self.state is EngineState.SERVING and self.version >= 0


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A published version: complete on disk under `path`. step: the optimizer step that made it."""

    version: int
    step: int
    path: str
    checksum: str
    published_ms: int = 0


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
    def closes(self) -> bool:
        """Invariant 3 for groups (generating is zero in a token tally: tokens are issued when submitted or "
        "reported).
        """
        return (
            self.issued
            == self.generating + self.ready + self.leased + self.trained + self.filtered + self.stale + self.failed
        )


@dataclass(frozen=True, slots=True)
class Steered:
    """What became of an operator's command. reason: a stable word if it was refused, else "". time_ms, version: then.

    Reasons: ended (the run is over), interval (below what the publish interval needs), changed (not the expected value
    any more), not-running, no-trainer, nothing-new (no step since the last checkpoint), unsupported.
    """

    done: bool
    reason: str
    detail: str
    time_ms: int
    version: int


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
class Detail:
    """What only a page asks for. by: (waiting or trained, dimension, name) -> oldest version (waiting) or lag -> count.

    trained_wait_ms: upper end of a bucket of the time in queue -> groups trained or filtered in the surviving history.
    waiting_p50_ms, waiting_p95_ms: time in queue of what waits (nearest rank), 0 if nothing does. events, dead: newest
    first. lag_changed_step: step at which max_lag was changed last, -1: never. evaluations: results, newest first
    (rollout/evaluation/run.py).
    """

    by: dict[tuple[str, str, str], dict[int, LagCount]]
    trained_wait_ms: dict[int, int]
    waiting_p50_ms: int
    waiting_p95_ms: int
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
    far (mean). counters: running totals by name (docs/how-the-guarantees-work.md lists them). metrics: the trainer's
    last step record. detail: only if it was asked for.
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
    counters: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, object] = field(default_factory=dict)
    dead_letters: int = 0
    detail: Detail | None = None
