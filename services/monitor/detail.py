"""Events, dead letters, workers, versions, and who caused which staleness: answers from a snapshot's detail. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from broker.types import LagCount, Snapshot, Waited, Waiting
from services.monitor.figures import WORKER_SILENT_MS, distribution, finite
from services.monitor.shapes import Answer, Lags, base, lags

SHOWN = 200
"""Events and dead letters that a full look brings."""
FEW = 12
"""Those that any look brings: what the page shows."""


class EventAnswer(BaseModel):
    """One line of the event log."""

    time_ms: int
    kind: str = Field(examples=["steer"])
    text: str = Field(examples=["lag: max_lag 8 -> 4 (by ada: loss spikes)"])


class EventsAnswer(Answer):
    """The newest events first."""

    events: list[EventAnswer]


class DeadLetterAnswer(BaseModel):
    """A prompt that was given up after all its tries."""

    prompt_index: int
    group_id: str = Field(description="As text: it may be larger than JSON numbers are exact.")
    attempt: int
    reason: str
    worker: str
    time_ms: int


class DeadLettersAnswer(Answer):
    """The newest first. total: all there are."""

    total: int
    dead_letters: list[DeadLetterAnswer]


class WorkerAnswer(BaseModel):
    """A rollout worker. stats: what it said of itself last."""

    worker: str
    alive: bool = Field(description="It said so in the last 30 seconds.")
    silent_seconds: float | None
    stats: dict[str, float | int | str | None]


class WorkersAnswer(Answer):
    """All workers of the last hour."""

    alive: int
    workers: list[WorkerAnswer]


class VersionAnswer(BaseModel):
    """A published version. engines: those that serve it, confirmed."""

    version: int
    step: int
    checksum: str
    published_ms: int
    engines: list[str]


class VersionsAnswer(Answer):
    """Versions whose files are still there, oldest first. highest: the largest number ever named."""

    published: int
    highest: int
    versions: list[VersionAnswer]


class Score(BaseModel):
    """A score with its 95 % interval over prompts."""

    value: float
    low: float
    high: float


class EvaluationAnswer(BaseModel):
    """One task on one version. evaluation_lag: the trainer's version when the result was there, less this one."""

    task: str = Field(examples=["aime24"])
    version: int
    step: int
    evaluation_lag: int
    time_ms: int
    prompts: int
    samples: int
    missing: int
    scores: dict[str, Score] = Field(examples=[{"avg@8": {"value": 0.25, "low": 0.18, "high": 0.34}}])


class EvaluationsAnswer(Answer):
    """The newest results first."""

    evaluations: list[EvaluationAnswer]


class Wait(BaseModel):
    """Seconds, nearest rank; all but the mean of what was trained: to the upper end of a bucket that is 9 % wide."""

    min: float
    mean: float
    p50: float
    p95: float
    max: float


class NamedStaleness(BaseModel):
    """What waits and what was trained of one task, engine or worker: lag of the whole group, and time in queue."""

    waiting: Lags
    trained: Lags
    waiting_seconds: Wait | None = Field(description="Null: nothing of it waits.")
    trained_seconds: Wait | None = Field(description="Null: nothing of it was trained.")


def events(s: Snapshot, limit: int = SHOWN) -> EventsAnswer:
    """GET /v1/events."""
    found = s.detail.events[:limit] if s.detail else ()
    return EventsAnswer(**base(s), events=[EventAnswer(time_ms=e.time_ms, kind=e.kind, text=e.text) for e in found])


def evaluations(s: Snapshot, limit: int = SHOWN) -> EvaluationsAnswer:
    """GET /v1/evaluations."""
    found = s.detail.evaluations[:limit] if s.detail else ()
    read = [evaluation(record) for record in found]
    return EvaluationsAnswer(**base(s), evaluations=[one for one in read if one is not None])


def evaluation(record: Mapping[str, Any]) -> EvaluationAnswer | None:
    """A record of the evaluator (rollout/evaluation/run.py); None for one that does not read as such."""
    same = ("version", "step", "evaluation_lag", "time_ms", "prompts", "samples", "missing")
    try:
        scores = {name: Score(**score) for name, score in record.items() if isinstance(score, dict) and "low" in score}
        return EvaluationAnswer(task=record["label"], scores=scores, **{name: record[name] for name in same})
    except (KeyError, TypeError, AttributeError, ValueError):  # pydantic's error is a ValueError
        return None


def newest_evaluations(s: Snapshot) -> list[EvaluationAnswer]:
    """The newest result of each task, by its name."""
    found: dict[str, EvaluationAnswer] = {}
    for one in evaluations(s).evaluations:
        found.setdefault(one.task, one)
    return [found[task] for task in sorted(found)]


def dead_letters(s: Snapshot, limit: int = SHOWN) -> DeadLettersAnswer:
    """GET /v1/dead-letters."""
    found = s.detail.dead[:limit] if s.detail else ()
    return DeadLettersAnswer(
        **base(s),
        total=s.dead_letters,
        dead_letters=[
            DeadLetterAnswer(
                prompt_index=d.prompt_index,
                group_id=str(d.group_id),
                attempt=d.attempt,
                reason=d.reason,
                worker=d.worker,
                time_ms=d.time_ms,
            )
            for d in found
        ],
    )


def workers(s: Snapshot) -> WorkersAnswer:
    """GET /v1/workers."""
    found = []
    for name, stats in s.workers.items():
        beat = stats.get("heartbeat_ms")
        silent = s.time_ms - float(beat) if isinstance(beat, int | float) else None
        found.append(
            WorkerAnswer(
                worker=name,
                alive=silent is None or silent <= WORKER_SILENT_MS,
                silent_seconds=None if silent is None else max(0.0, silent / 1000),
                stats=flat(stats),
            )
        )
    return WorkersAnswer(**base(s), alive=sum(w.alive for w in found), workers=found)


def flat(stats: Mapping[str, object]) -> dict[str, float | int | str | None]:
    """What JSON can hold of a worker's own words."""
    out: dict[str, float | int | str | None] = {}
    for key, value in stats.items():
        clean = finite(value)
        if clean is None or isinstance(clean, float | int | str):
            out[str(key)] = clean
    return out


def versions(s: Snapshot) -> VersionsAnswer:
    """GET /v1/versions."""
    return VersionsAnswer(
        **base(s),
        published=s.published,
        highest=s.highest_version,
        versions=[
            VersionAnswer(
                version=v.version,
                step=v.step,
                checksum=v.checksum,
                published_ms=v.published_ms,
                engines=[e.engine_id for e in s.engines if e.routable and e.version == v.version],
            )
            for v in s.versions
        ],
    )


def by_name(s: Snapshot, dimension: Literal["task", "engine", "worker"]) -> dict[str, NamedStaleness]:
    """Who caused which lag: name -> what waits of it and what was trained of it, by the lag of the whole group."""
    if s.detail is None:
        return {}
    known = [*((kind, name) for _, kind, name in s.detail.by), *s.detail.waiting_by, *s.detail.waited_by]
    names = sorted({name for kind, name in known if kind == dimension})
    waiting, waited = s.detail.waiting_by, s.detail.waited_by
    return {
        name: NamedStaleness(
            waiting=_waiting(s, dimension, name),
            trained=_trained(s, dimension, name),
            waiting_seconds=waiting_seconds(waiting.get((dimension, name))),
            trained_seconds=trained_wait_seconds(waited.get((dimension, name))),
        )
        for name in names
    }


def _waiting(s: Snapshot, dimension: str, name: str) -> Lags:
    return lags({s.version - oldest: count for oldest, count in _of(s, "waiting", dimension, name).items()})


def _trained(s: Snapshot, dimension: str, name: str) -> Lags:
    return lags(_of(s, "trained", dimension, name))


def _of(s: Snapshot, what: str, dimension: str, name: str) -> Mapping[int, LagCount]:
    return s.detail.by.get((what, dimension, name), {}) if s.detail else {}


def waiting_seconds(waiting: Waiting | None) -> Wait | None:
    """Time in queue of what waits now; None if nothing does."""
    if waiting is None:
        return None
    of = {"min": waiting.min_ms, "mean": waiting.mean_ms, "p50": waiting.p50_ms, "p95": waiting.p95_ms}
    return Wait(**{name: value / 1000 for name, value in {**of, "max": waiting.max_ms}.items()})


def trained_wait_seconds(waited: Waited | None) -> Wait | None:
    """Time in queue of what was trained or filtered; None before the first."""
    found = distribution(waited.groups) if waited is not None else None
    if waited is None or found is None:
        return None
    of = {"min": found.min, "mean": waited.total_ms / found.count, "p50": found.p50, "p95": found.p95}
    return Wait(**{name: value / 1000 for name, value in {**of, "max": found.max}.items()})
