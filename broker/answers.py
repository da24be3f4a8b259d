"""What the queue answers to workers, trainer and operators, and what the registry holds.

Invariant: plain values; what is refused has a stable reason word and a sentence for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from broker.trajectory import Group


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


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Leased groups with their payloads. ahead: ids of ready groups that come next, as many as were asked for."""

    deliveries: tuple[Delivery, ...]
    groups: tuple[Group, ...]
    ahead: tuple[int, ...]


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


@dataclass(frozen=True, slots=True)
class Steered:
    """What became of an operator's command. reason: a stable word if it was refused, else "". time_ms, version: then.

    Reasons: ended (the run is over), interval (below what the publish interval needs), changed (not the expected value
    any more), not-running, no-trainer, nothing-new (no step since the last checkpoint), unsupported. Of requeue:
    no-dead-letter.
    """

    done: bool
    reason: str
    detail: str
    time_ms: int
    version: int


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


NO_SERVER = -1


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine in the registry. version: the last confirmed one, -1 if none. since_ms: server time of the last
    change. pid: of its server; 0: nobody supervises it; NO_SERVER: its supervisor has none that is ready.
    staged, staged_path: the version whose files its supervisor has on the engine's host, and where; -1: none.
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

    @property
    def down(self) -> bool:
        """Whether its supervisor says that it has no server; one that answers there is not yet known to be sound."""
        return self.state is EngineState.GONE and self.pid == NO_SERVER


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A published version: complete on disk under `path`. step: the optimizer step that made it."""

    version: int
    step: int
    path: str
    checksum: str
    published_ms: int = 0
