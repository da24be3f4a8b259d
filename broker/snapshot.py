"""Turns the answer of lua/snapshot.lua into a Snapshot. Pure.

Invariant: every number in a Snapshot comes from that one answer, so all of them hold at the same instant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from broker.types import EngineRecord, EngineState, LagCount, Snapshot, Tally, VersionRecord

STATES = ("issued", "generating", "ready", "leased", "trained", "durable", "filtered", "stale", "failed")


def pairs(flat: Sequence[str]) -> dict[str, str]:
    """A Redis hash, answered as name, value, name, value, as a dict."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def tally(ledger: Mapping[str, str], unit: str) -> Tally:
    """unit: "g" for groups, "t" for tokens."""
    return Tally(**{state: int(ledger.get(f"{unit}_{state}", 0)) for state in STATES})


def histogram(fields: Mapping[str, str]) -> dict[int, LagCount]:
    """From g:<n> and t:<n> to n -> LagCount, n rising."""
    at = sorted({int(name.split(":")[1]) for name in fields})
    return {n: LagCount(int(fields.get(f"g:{n}", 0)), int(fields.get(f"t:{n}", 0))) for n in at}


def engine(text: str) -> EngineRecord:
    """From the registry's JSON."""
    return msgspec.json.decode(text, type=EngineRecord)


def engine_json(record: EngineRecord) -> str:
    """To the registry's JSON."""
    return msgspec.json.encode({**_fields(record), "state": EngineState(record.state).value}).decode()


def version(text: str) -> VersionRecord:
    """From the registry's JSON."""
    return msgspec.json.decode(text, type=VersionRecord)


def version_json(record: VersionRecord) -> str:
    """To the registry's JSON."""
    return msgspec.json.encode(_fields(record)).decode()


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def parse(answer: Sequence[Any]) -> Snapshot:
    """answer: as the head of lua/snapshot.lua says."""
    now, oldest, dead = int(answer[0]), answer[1], int(answer[2])
    policy, ledger, ready, lags, counters, engines, versions, workers = (pairs(flat) for flat in answer[3:])
    groups = tally(ledger, "g")
    waits = int(ledger.get("waits", 0))
    totals = {name: float(value) for name, value in sorted(counters.items())}
    totals["trainer_lease_left_ms"] = float(int(policy.get("trainer_deadline", now)) - now)
    return Snapshot(
        time_ms=now,
        run=policy["run"],
        status=policy["status"],
        max_lag=int(policy["max_lag"]),
        groups_per_step=int(policy["groups_per_step"]),
        publish_interval=int(policy["publish_interval"]),
        version=int(policy["version"]),
        published=int(policy["published"]),
        highest_version=int(policy["highest"]),
        step=int(policy["step"]),
        durable_step=int(policy["durable_step"]),
        steps_total=int(policy["steps_total"]),
        epoch=int(policy["epoch"]),
        admission_paused=policy["paused"] == "1",
        groups=groups,
        tokens=tally(ledger, "t"),
        payload_bytes=int(ledger.get("bytes", 0)),
        ready_by_version=histogram(ready),
        trained_by_lag=histogram(lags),
        oldest_ready_ms=now - int(oldest) if oldest else 0,
        mean_ready_ms=now - int(ledger.get("ready_ms", 0)) / groups.ready if groups.ready else 0.0,
        mean_trained_wait_ms=int(ledger.get("wait_ms", 0)) / waits if waits else 0.0,
        engines=tuple(engine(engines[name]) for name in sorted(engines)),
        workers={name: msgspec.json.decode(workers[name]) for name in sorted(workers)},
        versions=tuple(sorted(map(version, versions.values()), key=lambda record: record.version)),
        counters=totals,
        metrics=msgspec.json.decode(policy.get("metrics", "{}")),
        dead_letters=dead,
    )
