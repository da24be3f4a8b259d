"""Turns the answer of lua/snapshot.lua into a Snapshot. Pure.

Invariant: every number in a Snapshot comes from that one answer, so all of them hold at the same instant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from broker.types import (
    DeadLetter,
    Detail,
    EngineRecord,
    EngineState,
    Event,
    GroupRecord,
    GroupState,
    LagCount,
    Snapshot,
    Steered,
    Tally,
    VersionRecord,
    Waited,
    Waiting,
)

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


def attributed(fields: Mapping[str, str]) -> dict[tuple[str, str, str], dict[int, LagCount]]:
    """From g:<what>:<dimension>:<at>:<name> and t:<...> to (what, dimension, name) -> at -> LagCount, `at` rising."""
    found: dict[tuple[str, str, str], dict[int, list[int]]] = {}
    for key, value in fields.items():
        unit, what, dimension, at, name = key.split(":", 4)
        if unit not in ("g", "t"):
            continue
        found.setdefault((what, dimension, name), {}).setdefault(int(at), [0, 0])[unit == "t"] = int(value)
    # A count below 0 is a rollback of a worker that was forgotten meanwhile.
    return {
        who: {at: LagCount(*counts[at]) for at in sorted(counts) if counts[at][0] > 0} for who, counts in found.items()
    }


def bucket_end_ms(bucket: int) -> int:
    """Largest time in queue, in milliseconds, that falls into a bucket of wait_hist (common.lua)."""
    return math.ceil(1000 * (math.pow(2, (bucket + 1) / 8) - 1)) - 1


def waited_by_name(fields: Mapping[str, str]) -> dict[tuple[str, str], Waited]:
    """From w:trained:<dimension>:<bucket>:<name> and s:trained:<...> to (dimension, name) -> time in queue."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for key, value in fields.items():
        unit, _, dimension, at, name = key.split(":", 4)
        if unit == "w" and int(value) > 0:
            found.setdefault((dimension, name), {})[bucket_end_ms(int(at))] = int(value)
    return {who: Waited(int(fields.get(f"s:trained:{who[0]}:0:{who[1]}", 0)), of) for who, of in found.items()}


def waiting_times(item: Sequence[Any], submitted: int, now: int) -> Waiting:
    """item: of lua/snapshot.lua. submitted: sum of the submission times, ms."""
    youngest, p50, p95, oldest = (now - int(mark) for mark in item[3:7])
    return Waiting(int(item[2]), youngest, now - submitted / int(item[2]), p50, p95, oldest)


def detail(answer: Sequence[Any], policy: Mapping[str, str], ledger: Mapping[str, str], now: int) -> Detail:
    """answer: what follows `workers` in the answer of lua/snapshot.lua."""
    by, waits, events, dead, evaluations, queues = answer
    fields = pairs(by)
    waiting = {
        (item[0], item[1]): waiting_times(item, int(fields.get(f"s:waiting:{item[0]}:0:{item[1]}", 0)), now)
        for item in queues
        if item[0]
    }
    everything = next(
        (waiting_times(item, int(ledger.get("ready_ms", 0)), now) for item in queues if not item[0]), None
    )
    waited = {bucket_end_ms(i): count.groups for i, count in histogram(pairs(waits)).items()}
    return Detail(
        by=attributed(fields),
        waited=Waited(int(ledger.get("wait_ms", 0)), waited),
        waiting=everything,
        waited_by=waited_by_name(fields),
        waiting_by=waiting,
        events=tuple(msgspec.json.decode(text, type=Event) for text in events),
        dead=tuple(msgspec.json.decode(text, type=DeadLetter, strict=False) for text in dead if text),
        lag_changed_step=int(policy.get("lag_changed_step", -1)),
        checkpoint_asked="checkpoint_asked" in policy,
        evaluations=tuple(msgspec.json.decode(text) for text in evaluations),
    )


def group_record(item: Sequence[Any]) -> GroupRecord:
    """item: a group's id and its record as JSON (lua/groups.lua)."""
    r: dict[str, Any] = msgspec.json.decode(item[1])
    return GroupRecord(
        group_id=int(item[0]),
        state=GroupState(r["state"]),
        prompt_index=int(r["prompt"]),
        attempt=int(r["attempt"]),
        worker=r["worker"],
        engine=r["engine"],
        admitted_version=int(r["version"]),
        issued_ms=int(r["issued"]),
        oldest_version=int(r.get("oldest", -1)),
        samples=int(r.get("samples", 0)),
        response_tokens=int(r.get("tokens", 0)),
        total_tokens=int(r.get("total", 0)),
        payload_bytes=int(r.get("bytes", 0)),
        submitted_ms=int(r.get("submitted", 0)),
        pulled_ms=int(r.get("pulled", 0)),
        step=int(r.get("step", 0)),
        trained_at=int(r.get("trained_at", -1)),
        blob=r.get("blob", ""),
    )


def steered(answer: Sequence[Any]) -> Steered:
    """answer: as the head of lua/steer.lua says."""
    refused = answer[0] == "refused"
    reason, sentence = (answer[3], answer[4]) if refused else ("", answer[3])
    return Steered(not refused, reason, sentence, int(answer[1]), int(answer[2]))


def parse(answer: Sequence[Any]) -> Snapshot:
    """answer: as the head of lua/snapshot.lua says."""
    now, oldest, dead = int(answer[0]), answer[1], int(answer[2])
    policy, ledger, ready, lags, counters, engines, versions, workers = (pairs(flat) for flat in answer[3:11])
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
        pull_max_lag=int(policy.get("pull_max_lag", -1)),
        counters=totals,
        metrics=msgspec.json.decode(policy.get("metrics", "{}")),
        dead_letters=dead,
        detail=detail(answer[11:], policy, ledger, now) if len(answer) > 11 else None,
    )
