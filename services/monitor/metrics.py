"""The run's metrics for Prometheus, from one snapshot. Pure; docs/metrics.md lists every name of `METRICS`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from broker.types import EngineState, LagCount, Snapshot, Tally
from services.monitor import detail, views
from services.monitor.diagnosis import Diagnosis, Verdict
from services.monitor.figures import Distribution, capacity, in_flight, living_workers, number
from services.monitor.shapes import lags

STATISTICS = ("min", "mean", "p50", "p95", "max")


@dataclass(frozen=True, slots=True)
class Name:
    """A metric: its name without prefix and suffix, kind, labels, and what it says."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    text: str

    @property
    def exposed(self) -> str:
        """As Prometheus sees it."""
        return f"lagrange_{self.name}{'_total' if self.kind == 'counter' else ''}"


METRICS = (
    Name("snapshot_timestamp_seconds", "gauge", (), "Redis server time of the snapshot that all these come from."),
    Name("step", "gauge", (), "Optimizer steps in the surviving history."),
    Name("steps_planned", "gauge", (), "Steps after which the run ends."),
    Name("durable_step", "gauge", (), "Last step that a durable checkpoint holds."),
    Name("version", "gauge", (), "The trainer's policy version."),
    Name("published_version", "gauge", (), "Newest published version, -1: none."),
    Name("max_lag_versions", "gauge", (), "The bound on policy lag."),
    Name("admission_paused", "gauge", (), "1 while no group may be started."),
    Name("groups", "gauge", ("state",), "Groups by state; issued = the sum of the others but durable."),
    Name("tokens", "gauge", ("state",), "Trainable tokens by state."),
    Name("ledger_closes", "gauge", ("unit",), "1 if issued is the sum of all states, in groups or tokens."),
    Name("groups_in_flight", "gauge", (), "Groups that generate, wait or are being trained."),
    Name("groups_in_flight_limit", "gauge", (), "(max_lag + 1) x groups per step."),
    Name("waiting_lag_groups", "gauge", ("lag",), "Groups that wait, by the policy lag that they have now."),
    Name("waiting_lag_tokens", "gauge", ("lag",), "Tokens that wait, by the policy lag that they have now."),
    Name("trained_lag_groups", "gauge", ("lag",), "Groups trained in the surviving history, by policy lag."),
    Name("trained_lag_tokens", "gauge", ("lag",), "Tokens trained in the surviving history, by policy lag."),
    Name("waiting_lag_versions", "gauge", ("statistic",), "Policy lag of the tokens that wait; absent if none do."),
    Name("trained_lag_versions", "gauge", ("statistic",), "Policy lag of the tokens that were trained."),
    Name("oldest_waiting_seconds", "gauge", (), "Time in queue of the group that waits longest; absent if none."),
    Name("mean_waiting_seconds", "gauge", (), "Mean time in queue of what waits; absent if nothing does."),
    Name("mean_trained_wait_seconds", "gauge", (), "Mean time in queue of all that was trained."),
    Name("waiting_seconds", "gauge", ("statistic",), "Time in queue of what waits now: min, mean, p50, p95, max."),
    Name("trained_wait_seconds", "gauge", ("statistic",), "Time in queue of all that was trained: the same."),
    Name(
        "named_waiting_seconds",
        "gauge",
        ("by", "name", "statistic"),
        "Time in queue of what waits now, by task, engine and living worker.",
    ),
    Name(
        "named_trained_wait_seconds",
        "gauge",
        ("by", "name", "statistic"),
        "Time in queue of all that was trained, by task, engine and living worker.",
    ),
    Name("payload_bytes", "gauge", (), "Bytes of the payloads in Redis."),
    Name("dead_letters", "gauge", (), "Prompts that were given up."),
    Name("engine_version", "gauge", ("engine",), "Confirmed version of an engine, -1: none."),
    Name("engine_publish_lag_versions", "gauge", ("engine",), "The trainer's version less the engine's."),
    Name("engine_routable", "gauge", ("engine",), "1 if new groups may be sent to it."),
    Name("engines", "gauge", ("state",), "Engines by state."),
    Name("workers", "gauge", (), "Rollout workers with a heartbeat in the last 30 seconds."),
    Name(
        "worker_metric",
        "gauge",
        ("worker", "name"),
        "Each number of a living worker's last heartbeat: its own counters.",
    ),
    Name("trainer_lease_left_seconds", "gauge", (), "Time until the trainer counts as gone."),
    Name("trainer_metric", "gauge", ("name",), "Each finite number of the trainer's last step record (of SAT: sat_*)."),
    Name("trainer_wait_share", "gauge", (), "Share of the trainer's time that it waited for groups, last steps."),
    Name(
        "admission_blocked_share",
        "gauge",
        (),
        "Share of the workers' time that the bound or memory held them back, last minute.",
    ),
    Name("engine_wait_share", "gauge", (), "Share of the workers' time without an engine that serves, last minute."),
    Name("filtered_group_share", "gauge", (), "Share of the trained groups without a gradient, last steps."),
    Name("stale_token_share", "gauge", (), "Share of tokens that went stale of those trained or stale, last minute."),
    Name(
        "evaluation_score", "gauge", ("task", "score", "bound"), "Newest score of a task: value, low and high (95 %)."
    ),
    Name("evaluation_version", "gauge", ("task",), "Version that the newest score is of."),
    Name("evaluation_step", "gauge", ("task",), "Optimizer step that made that version."),
    Name(
        "evaluation_lag_versions", "gauge", ("task",), "The trainer's version when that score was there, less its own."
    ),
    Name("verdict", "gauge", ("verdict",), "1 for the verdict of GET /v1/diagnosis."),
    Name("events", "counter", ("name",), "The broker's running totals (docs/how-the-guarantees-work.md)."),
)
_NOT_COUNTED = frozenset({"trainer_lease_left_ms"})
Samples = Iterable[tuple[tuple[str, ...], float]]


def render(s: Snapshot, diagnosis: Diagnosis) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry()
    registry.register(_Collected(samples(s, diagnosis)))
    return bytes(generate_latest(registry))


class _Collected:
    def __init__(self, values: Mapping[str, Samples]) -> None:
        self._values = values

    def collect(self) -> Iterator[Any]:
        for metric in METRICS:
            family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            made = family(f"lagrange_{metric.name}", metric.text, labels=metric.labels)
            for labels, value in self._values[metric.name]:
                made.add_metric(labels, value)
            yield made


def samples(s: Snapshot, diagnosis: Diagnosis) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """Metric -> its samples, as (label values, value)."""
    waiting, figures = views.waiting_by_lag(s), diagnosis.figures
    trained = s.trained_by_lag
    counters = {name: value for name, value in s.counters.items() if name not in _NOT_COUNTED}
    left = s.counters.get("trainer_lease_left_ms")
    known = [(e, s.version - e.version) for e in s.engines if e.version >= 0]
    record = {name: value for name in s.metrics if (value := number(s.metrics, name)) is not None}
    sat = s.metrics.get("sat")
    if isinstance(sat, Mapping):
        record |= {f"sat_{name}": value for name in sat if (value := number(sat, name)) is not None}
    anything = s.groups.trained + s.groups.filtered > 0
    return {
        "snapshot_timestamp_seconds": _one(s.time_ms / 1000),
        "step": _one(s.step),
        "steps_planned": _one(s.steps_total),
        "durable_step": _one(s.durable_step),
        "version": _one(s.version),
        "published_version": _one(s.published),
        "max_lag_versions": _one(s.max_lag),
        "admission_paused": _one(s.admission_paused),
        "groups": _tally(s.groups),
        "tokens": _tally(s.tokens),
        "ledger_closes": [(("groups",), float(s.groups.closes)), (("tokens",), float(s.tokens.closes))],
        "groups_in_flight": _one(in_flight(s)),
        "groups_in_flight_limit": _one(capacity(s)),
        "waiting_lag_groups": _by_lag(waiting, "groups"),
        "waiting_lag_tokens": _by_lag(waiting, "tokens"),
        "trained_lag_groups": _by_lag(trained, "groups"),
        "trained_lag_tokens": _by_lag(trained, "tokens"),
        "waiting_lag_versions": _statistics(lags(waiting).tokens),
        "trained_lag_versions": _statistics(lags(trained).tokens),
        "oldest_waiting_seconds": _one(s.oldest_ready_ms / 1000) if s.groups.ready else [],
        "mean_waiting_seconds": _one(s.mean_ready_ms / 1000) if s.groups.ready else [],
        "mean_trained_wait_seconds": _one(s.mean_trained_wait_ms / 1000) if anything else [],
        "waiting_seconds": _wait(detail.waiting_seconds(s.detail.waiting if s.detail else None)),
        "trained_wait_seconds": _wait(detail.trained_wait_seconds(s.detail.waited if s.detail else None)),
        **_named_waits(s),
        "payload_bytes": _one(s.payload_bytes),
        "dead_letters": _one(s.dead_letters),
        "engine_version": [((e.engine_id,), float(e.version)) for e in s.engines],
        "engine_publish_lag_versions": [((e.engine_id,), float(behind)) for e, behind in known],
        "engine_routable": [((e.engine_id,), float(e.routable)) for e in s.engines],
        "engines": [((one.value,), float(sum(e.state is one for e in s.engines))) for one in EngineState],
        "workers": _one(living_workers(s)),
        "worker_metric": _workers(s),
        "trainer_lease_left_seconds": [] if left is None else _one(left / 1000),
        "trainer_metric": [((name,), value) for name, value in sorted(record.items())],
        "trainer_wait_share": _maybe(figures["trainer_wait_share"]),
        "admission_blocked_share": _maybe(figures["admission_blocked_share"]),
        "engine_wait_share": _maybe(figures["engine_wait_share"]),
        "filtered_group_share": _maybe(figures["filtered_share"]),
        "stale_token_share": _maybe(figures["stale_share"]),
        **_evaluations(s),
        "verdict": [((one.value,), float(diagnosis.verdict is one)) for one in Verdict],
        "events": [((name,), value) for name, value in sorted(counters.items())],
    }


def _one(value: float) -> list[tuple[tuple[str, ...], float]]:
    return [((), float(value))]


def _maybe(value: float | None) -> list[tuple[tuple[str, ...], float]]:
    return [] if value is None else _one(value)


def _evaluations(s: Snapshot) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    newest = detail.newest_evaluations(s)
    return {
        "evaluation_score": [
            ((e.task, name, bound), float(getattr(score, bound)))
            for e in newest
            for name, score in e.scores.items()
            for bound in ("value", "low", "high")
        ],
        "evaluation_version": [((e.task,), float(e.version)) for e in newest],
        "evaluation_step": [((e.task,), float(e.step)) for e in newest],
        "evaluation_lag_versions": [((e.task,), float(e.evaluation_lag)) for e in newest],
    }


def _workers(s: Snapshot) -> list[tuple[tuple[str, ...], float]]:
    return [
        ((one.worker, name), value)
        for one in detail.workers(s).workers
        if one.alive
        for name in sorted(one.stats)
        if name != "heartbeat_ms" and (value := number(one.stats, name)) is not None
    ]


def _tally(t: Tally) -> list[tuple[tuple[str, ...], float]]:
    return [((state.name,), float(getattr(t, state.name))) for state in fields(t)]


def _by_lag(counts: Mapping[int, LagCount], unit: str) -> list[tuple[tuple[str, ...], float]]:
    return [((str(lag),), float(getattr(count, unit))) for lag, count in sorted(counts.items())]


def _wait(wait: detail.Wait | None) -> list[tuple[tuple[str, ...], float]]:
    return [] if wait is None else [((name,), float(getattr(wait, name))) for name in STATISTICS]


def _named_waits(s: Snapshot) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """Bounded: tasks, engines of the run, and workers that live (their names change with every start)."""
    waiting, waited = (s.detail.waiting_by, s.detail.waited_by) if s.detail else ({}, {})
    living = {("worker", one.worker) for one in detail.workers(s).workers if one.alive}
    named = sorted(who for who in {*waiting, *waited} if who[0] != "worker" or who in living)
    return {
        "named_waiting_seconds": [
            ((*who, *labels), value)
            for who in named
            for labels, value in _wait(detail.waiting_seconds(waiting.get(who)))
        ],
        "named_trained_wait_seconds": [
            ((*who, *labels), value)
            for who in named
            for labels, value in _wait(detail.trained_wait_seconds(waited.get(who)))
        ],
    }


def _statistics(d: Distribution | None) -> list[tuple[tuple[str, ...], float]]:
    return [] if d is None else [((name,), float(getattr(d, name))) for name in STATISTICS]
