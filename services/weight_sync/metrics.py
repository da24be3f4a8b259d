"""Weight-sync's metrics for Prometheus. Pure: figures in, text out; docs/metrics.md lists every name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from broker.types import EngineState
from services.weight_sync.member import Member
from services.weight_sync.reconciler import Reconciler

PREFIX = "lagrange_weight_sync_"


def render(reconciler: Reconciler) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry()
    registry.register(_Figures(reconciler))
    return bytes(generate_latest(registry))


class _Figures:
    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def collect(self) -> Iterator[Any]:
        r, totals = self._reconciler, self._reconciler.totals
        published, staged = r.published, r.staged
        yield _gauge("published_version", "Newest published version, -1: none.", published.version if published else -1)
        yield _gauge("staged_version", "Newest version that may be loaded, -1: none.", staged.version if staged else -1)
        yield _counter("looks", "Looks at the registry that succeeded.", totals.looks)
        yield _counter("registry_failures", "Looks at the registry that failed.", totals.registry_failures)
        yield _counter("unexpected_errors", "Errors that no part of the service expects.", totals.unexpected_errors)
        yield _counter("stagings", "Versions that were checked and found complete.", totals.stagings)
        yield _counter("staging_failures", "Versions that were found incomplete.", totals.staging_failures)
        yield _counter("staged_bytes", "Bytes read while staging.", totals.staged_bytes)
        yield _counter(
            "transport_fallbacks",
            "Loads of the published files where weights.transport is another way.",
            self._reconciler.transport.fallbacks,
        )
        yield _gauge("last_staging_seconds", "Time of the last staging.", totals.last_staging_seconds)
        yield from _of_engines(list(r.members.values()))


def _of_engines(members: list[Member]) -> Iterator[Any]:
    state = GaugeMetricFamily(PREFIX + "engine_state", "1 for the state an engine is in.", labels=["engine", "state"])
    for member in members:
        for one in EngineState:
            state.add_metric([member.shown.engine_id, one.value], float(member.shown.state is one))
    yield state
    gauges: dict[str, tuple[str, Callable[[Member], float]]] = {
        "engine_version": ("Confirmed version, -1: none.", lambda m: m.shown.version),
        "engine_may_be_paused": (
            "1 while a pause was sent and no continue is confirmed.",
            lambda m: m.life.maybe_paused,
        ),
        "engine_last_load_seconds": ("Time of the last load.", lambda m: m.figures.last_load_seconds),
        "engine_last_pause_seconds": (
            "Time for which the last load had requests held back, paused or by the engine's own lock.",
            lambda m: m.figures.last_pause_seconds,
        ),
        "engine_last_unroutable_seconds": (
            "Time from leaving `serving` to being back, last time.",
            lambda m: m.figures.last_unroutable_seconds,
        ),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["engine"])
        for member in members:
            gauge.add_metric([member.shown.engine_id], float(value(member)))
        yield gauge
    counters: dict[str, tuple[str, Callable[[Member], float]]] = {
        "engine_updates": ("Times that a version was confirmed.", lambda m: m.figures.updates),
        "engine_failures": ("Updates that failed.", lambda m: m.figures.failures),
        "engine_silent_probes": ("Probes without an answer.", lambda m: m.figures.silent_probes),
        "engine_exact_verifications": (
            "Updates whose every parameter was held against the files.",
            lambda m: m.figures.verified_exactly,
        ),
        "engine_load_seconds": ("Time spent in loads.", lambda m: m.figures.load_seconds),
        "engine_pause_seconds": ("Time for which requests were held back.", lambda m: m.figures.pause_seconds),
        "engine_unroutable_seconds": ("Time not routable after having served.", lambda m: m.figures.unroutable_seconds),
    }
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=["engine"])
        for member in members:
            counter.add_metric([member.shown.engine_id], float(value(member)))
        yield counter


def _gauge(name: str, text: str, value: float) -> Any:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Any:
    return CounterMetricFamily(PREFIX + name, text, value=float(value))
