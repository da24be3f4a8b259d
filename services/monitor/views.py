"""From a snapshot to what each endpoint answers. Pure.

Invariant: every answer carries the time and the version of the one snapshot that all its numbers come from. Policy lag
(trainer's version less the version that sampled) and publish lag (trainer's version less an engine's) are never mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from broker.types import EngineRecord, LagCount, Snapshot, Tally
from services.monitor import detail
from services.monitor.detail import EvaluationAnswer, EventAnswer, NamedStaleness, Wait, flat
from services.monitor.diagnosis import RECENT_STEPS, Diagnosis, Records, diagnose
from services.monitor.figures import capacity, finite, in_flight, number, settled, wait_share
from services.monitor.shapes import Answer, LagBucket, Lags, base, lags
from services.monitor.tiles import tiles


class TallyAnswer(BaseModel):
    """issued = generating + ready + leased + trained + filtered + stale + failed; `closes` says whether it is so."""

    issued: int
    generating: int
    ready: int
    leased: int
    trained: int
    durable: int = Field(description="Part of trained + filtered that no crash can take back.")
    filtered: int
    stale: int
    failed: int
    closes: bool


class TimeInQueue(BaseModel):
    """Seconds. oldest, mean: of what waits now, null if nothing does; trained_mean: of all that was trained."""

    oldest_seconds: float | None
    mean_seconds: float | None
    trained_mean_seconds: float | None
    waiting: Wait | None = Field(description="Of what waits now; null: nothing does.")
    trained: Wait | None = Field(description="Of all that was trained; null: nothing was.")


class QueueAnswer(Answer):
    """What is on its way to the trainer."""

    ready_groups: int = Field(description="Groups that wait for the trainer.")
    ready_tokens: int
    generating_groups: int
    leased_groups: int
    in_flight_groups: int
    in_flight_limit: int = Field(description="(max_lag + 1) x groups per step.")
    payload_bytes: int
    admission_paused: bool
    dead_letters: int
    time_in_queue: TimeInQueue


class PublishLag(BaseModel):
    """How far an engine is behind the trainer: its version less the engine's; null while none is confirmed."""

    engine_id: str
    state: str
    version: int
    publish_lag: int | None


class StalenessAnswer(QueueAnswer):
    """How old what waits is, and how old what was trained was."""

    max_lag: int
    groups: TallyAnswer
    groups_released: int = Field(
        description="Part of the failed groups that workers gave back, as they stopped or the data had ended."
    )
    tokens: TallyAnswer
    closes: bool = Field(description="Both ledgers close.")
    waiting: Lags
    trained: Lags = Field(description="As in the ledger: groups without a gradient (filtered) are not among them.")
    publish_lag: list[PublishLag]
    by_task: dict[str, NamedStaleness] = Field(
        description="Who caused which lag and which wait: by task, engine and worker."
    )
    by_engine: dict[str, NamedStaleness]
    by_worker: dict[str, NamedStaleness]


class RunAnswer(Answer):
    """Where the run is."""

    status: str = Field(examples=["running"])
    step: int
    steps_total: int
    durable_step: int
    published: int
    highest_version: int
    max_lag: int
    groups_per_step: int
    publish_interval: int
    epoch: int
    admission_paused: bool
    drained: bool = Field(description="Draining, and too little is left in flight for another step.")
    checkpoint_asked: bool = Field(description="An operator's checkpoint is still to come.")
    reward_mean: float | None


class EngineAnswer(PublishLag):
    """One engine. since_seconds: time in this state."""

    routable: bool
    detail: str
    since_seconds: float | None


class EnginesAnswer(Answer):
    """Engines and rollout workers. workers: what each said of itself in its last heartbeat."""

    published: int
    engines: list[EngineAnswer]
    workers: dict[str, dict[str, float | int | str | None]]


class TrainerAnswer(Answer):
    """The trainer. metrics: its last step record; wait_share: over the last steps."""

    step: int
    steps_total: int
    durable_step: int
    epoch: int
    lease_left_seconds: float | None
    wait_share: float | None
    metrics: dict[str, Any]


class LedgerAnswer(Answer):
    """Every issued group and token, and where it went."""

    groups: TallyAnswer
    tokens: TallyAnswer
    closes: bool


class DiagnosisAnswer(Answer):
    """The verdict."""

    diagnosis: Diagnosis


class Overview(Answer):
    """All that the live page shows, from one snapshot. history: the last steps, oldest first."""

    progress: RunAnswer
    staleness: StalenessAnswer
    fleet: EnginesAnswer
    trainer: TrainerAnswer
    diagnosis: Diagnosis
    tiles: dict[str, str] = Field(description="What the page's tiles say, by name.", examples=[{"lag": "0.99 (1)"}])
    events: list[EventAnswer] = Field(description="The newest first.")
    evaluations: list[EvaluationAnswer] = Field(description="The newest first.")
    history: dict[str, list[float | None]]


def tally(t: Tally) -> TallyAnswer:
    """A ledger with whether it closes."""
    fields = {name: getattr(t, name) for name in TallyAnswer.model_fields if name != "closes"}
    return TallyAnswer(**fields, closes=t.closes)


def waiting_by_lag(s: Snapshot) -> dict[int, LagCount]:
    """What waits, by the lag that it would have now: the trainer's version less its oldest version."""
    return {s.version - oldest: count for oldest, count in s.ready_by_version.items()}


def queue(s: Snapshot) -> QueueAnswer:
    """GET /v1/queue."""
    return QueueAnswer(**_queue(s))


def _queue(s: Snapshot) -> dict[str, Any]:
    waits, trained = s.groups.ready > 0, s.groups.trained + s.groups.filtered > 0
    return {
        **base(s),
        "ready_groups": s.groups.ready,
        "ready_tokens": s.tokens.ready,
        "generating_groups": s.groups.generating,
        "leased_groups": s.groups.leased,
        "in_flight_groups": in_flight(s),
        "in_flight_limit": capacity(s),
        "payload_bytes": s.payload_bytes,
        "admission_paused": s.admission_paused,
        "dead_letters": s.dead_letters,
        "time_in_queue": TimeInQueue(
            oldest_seconds=s.oldest_ready_ms / 1000 if waits else None,
            mean_seconds=s.mean_ready_ms / 1000 if waits else None,
            trained_mean_seconds=s.mean_trained_wait_ms / 1000 if trained else None,
            waiting=detail.waiting_seconds(s.detail.waiting if s.detail else None),
            trained=detail.trained_wait_seconds(s.detail.waited if s.detail else None),
        ),
    }


def staleness(s: Snapshot) -> StalenessAnswer:
    """GET /v1/staleness."""
    return StalenessAnswer(
        **_queue(s),
        max_lag=s.max_lag,
        groups=tally(s.groups),
        groups_released=int(s.counters.get("groups_released", 0)),
        tokens=tally(s.tokens),
        closes=s.groups.closes and s.tokens.closes,
        waiting=lags(waiting_by_lag(s)),
        trained=lags(s.trained_by_lag),
        publish_lag=[PublishLag(**_publish_lag(s, engine)) for engine in s.engines],
        by_task=detail.by_name(s, "task"),
        by_engine=detail.by_name(s, "engine"),
        by_worker=detail.by_name(s, "worker"),
    )


def lag_rows(s: StalenessAnswer) -> list[tuple[int, int, int, int]]:
    """For each lag: waiting groups, trained groups, trained tokens."""
    waiting, trained = ({b.lag: b for b in one.by_lag} for one in (s.waiting, s.trained))
    nothing = LagBucket(lag=0, groups=0, tokens=0)
    return [
        (lag, waiting.get(lag, nothing).groups, trained.get(lag, nothing).groups, trained.get(lag, nothing).tokens)
        for lag in sorted({*waiting, *trained})
    ]


def _publish_lag(s: Snapshot, engine: EngineRecord) -> dict[str, Any]:
    return {
        "engine_id": engine.engine_id,
        "state": engine.state.value,
        "version": engine.version,
        "publish_lag": s.version - engine.version if engine.version >= 0 else None,
    }


def run(s: Snapshot) -> RunAnswer:
    """GET /v1/run."""
    ours = ("reward_mean", "drained", "checkpoint_asked")
    same = {name: getattr(s, name) for name in RunAnswer.model_fields if name not in ours}
    return RunAnswer(
        **same,
        drained=s.status == "draining" and in_flight(s) < s.groups_per_step,
        checkpoint_asked=s.detail is not None and s.detail.checkpoint_asked,
        reward_mean=number(s.metrics, "reward_mean"),
    )


def engines(s: Snapshot) -> EnginesAnswer:
    """GET /v1/engines."""
    return EnginesAnswer(
        **base(s),
        published=s.published,
        engines=[
            EngineAnswer(
                **_publish_lag(s, engine),
                routable=engine.routable,
                detail=engine.detail,
                since_seconds=(s.time_ms - engine.since_ms) / 1000 if engine.since_ms else None,
            )
            for engine in s.engines
        ],
        workers={name: flat(stats) for name, stats in s.workers.items()},
    )


def trainer(s: Snapshot, records: Records) -> TrainerAnswer:
    """GET /v1/trainer."""
    left = s.counters.get("trainer_lease_left_ms")
    metrics = finite(s.metrics)
    assert isinstance(metrics, dict)
    return TrainerAnswer(
        **base(s),
        step=s.step,
        steps_total=s.steps_total,
        durable_step=s.durable_step,
        epoch=s.epoch,
        lease_left_seconds=None if left is None else left / 1000,
        wait_share=wait_share(settled(records)[-RECENT_STEPS:]),
        metrics=metrics,
    )


def ledger(s: Snapshot) -> LedgerAnswer:
    """GET /v1/ledger."""
    closes = s.groups.closes and s.tokens.closes
    return LedgerAnswer(**base(s), groups=tally(s.groups), tokens=tally(s.tokens), closes=closes)


HISTORY = (
    *("step", "reward_mean", "lag_mean", "lag_max", "wait_s", "step_s"),
    *("log_ratio_abs_mean", "gate_rate", "clip_fraction"),
)


def history(records: Records) -> dict[str, list[float | None]]:
    """Step records as columns by rising step; of two records of one step the newer (first given) counts."""
    by_step: dict[float, Mapping[str, object]] = {}
    for record in records:
        step = number(record, "step")
        if step is not None:
            by_step.setdefault(step, record)
    return {key: [number(by_step[step], key) for step in sorted(by_step)] for key in HISTORY}


def diagnosis(s: Snapshot, before: Snapshot | None, records: Records) -> DiagnosisAnswer:
    """GET /v1/diagnosis. records: newest first."""
    return DiagnosisAnswer(**base(s), diagnosis=diagnose(s, before, records))


def overview(s: Snapshot, before: Snapshot | None, records: Records) -> Overview:
    """GET /v1/overview: what the page shows."""
    found = diagnose(s, before, records)
    return Overview(
        **base(s),
        progress=run(s),
        staleness=staleness(s),
        fleet=engines(s),
        trainer=trainer(s, records),
        diagnosis=found,
        tiles=tiles(s, found.figures),
        events=detail.events(s, detail.FEW).events,
        evaluations=detail.evaluations(s, detail.FEW).evaluations,
        history=history(records),
    )
