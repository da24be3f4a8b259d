"""Arithmetic behind the pages: distributions, shares, finite numbers. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import TypeVar

from pydantic import BaseModel, Field

from broker.types import NEWEST, Snapshot

R = TypeVar("R", bound=Mapping[str, object])


class Distribution(BaseModel):
    """Of `count` things: smallest, mean, median, 95th percentile (nearest rank) and largest value."""

    count: int = Field(examples=[64])
    min: float = Field(examples=[0])
    mean: float = Field(examples=[1.2])
    p50: float = Field(examples=[1])
    p95: float = Field(examples=[3])
    max: float = Field(examples=[4])


def distribution(counts: Mapping[int, int]) -> Distribution | None:
    """Value -> how often, as a distribution; None if there is nothing (no sentinels)."""
    values = sorted((value, n) for value, n in counts.items() if n > 0)
    total = sum(n for _, n in values)
    if not total:
        return None
    return Distribution(
        count=total,
        min=values[0][0],
        mean=sum(value * n for value, n in values) / total,
        p50=_nearest_rank(values, 0.50, total),
        p95=_nearest_rank(values, 0.95, total),
        max=values[-1][0],
    )


def _nearest_rank(values: Sequence[tuple[int, int]], share: float, total: int) -> int:
    rank, seen = max(1, math.ceil(share * total)), 0
    for value, n in values:
        seen += n
        if seen >= rank:
            return value
    raise AssertionError("the counts do not add up to their total")


def number(record: Mapping[str, object], key: str) -> float | None:
    """A finite number of a step record, or of the part that SAT gives (`sat`); None if there is none."""
    value = record.get(key)
    if value is None and isinstance(sat := record.get("sat"), Mapping):
        value = sat.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is there."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def finite(value: object) -> object:
    """A copy in which every number that JSON cannot hold is None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def wait_share(records: Sequence[Mapping[str, object]]) -> float | None:
    """Share of the trainer's time that it waited for groups, over these step records; None without records."""
    waits, steps = 0.0, 0.0
    for record in records:
        wait, step = number(record, "wait_s"), number(record, "step_s")
        if wait is not None and step is not None and step > 0:
            waits, steps = waits + wait, steps + max(wait, step)
    return waits / steps if steps else None


def settled(records: Iterable[R]) -> list[R]:
    """By rising step, the steps after the first that the trainer made since it attached last: what that one waited for
    was the engines' start.

    A trainer that attaches begins a version of its own without a batch (docs/lag-bound.md), so its first step's version
    is not one more than the step's before. Of two records of one step the first given (the newer) counts.
    """
    by_step: dict[float, R] = {}
    for record in records:
        if (step := number(record, "step")) is not None:
            by_step.setdefault(step, record)
    ordered = [by_step[step] for step in sorted(by_step)]
    versions = [number(record, "version") for record in ordered]
    pairs = enumerate(pairwise(versions), 1)
    firsts = [at for at, (last, this) in pairs if last is not None and this is not None and this != last + 1]
    return ordered[max([0, *firsts]) + 1 :]


class Side(Enum):
    """Who waits for whom."""

    SAMPLING_IS_SLOW = auto()
    TRAINING_IS_SLOW = auto()
    BOTH_WAIT = auto()
    NEITHER_WAITS = auto()


def slow_side(trainer: float, bound: float, much: float) -> Side:
    """Which side the other waits for. trainer: share of its time that it waits for groups; bound: share of the workers'
    time that they are held at the lag bound, for the trainer; much: from where a share counts.

    Both wait where rollouts last longer than the bound allows for: only a higher one lets them overlap.
    """
    if trainer > much:
        return Side.BOTH_WAIT if bound > much else Side.SAMPLING_IS_SLOW
    return Side.TRAINING_IS_SLOW if bound > much else Side.NEITHER_WAITS


def stale_share(now: Snapshot, before: Snapshot | None) -> float | None:
    """Share of trainable tokens that went stale, of all that were trained or went stale since `before` (None: ever)."""
    stale, used = now.tokens.stale, now.tokens.trained
    if before is not None and before.tokens.stale <= stale and before.tokens.trained <= used:
        stale, used = stale - before.tokens.stale, used - before.tokens.trained
    return stale / (stale + used) if stale + used else None


def restart_stale_share(now: Snapshot, before: Snapshot | None) -> float | None:
    """Share of the groups that went stale since `before` which a restart of the trainer cost; None: none went stale.

    Those that were past the bound when the trainer attached, and those found by its pulls: its first version is one
    more than the last that was named, without a batch between them (docs/lag-bound.md).
    """
    attached, pulled, submitted = (_since(before, now, f"stale_at_{when}") for when in ("attach", "pull", "submit"))
    again = now.counters.get("attachments", 0.0) > 1 and _since(before, now, "attachments") > 0
    stale = attached + pulled + submitted
    return (attached + (pulled if again else 0.0)) / stale if stale > 0 else None


WORKER_SILENT_MS = 30_000


def living_workers(s: Snapshot) -> int:
    """Workers whose last heartbeat is at most 30 s old; Redis keeps those that ended for an hour."""
    ages = (s.time_ms - float(stats.get("heartbeat_ms", s.time_ms)) for stats in s.workers.values())
    return sum(age <= WORKER_SILENT_MS for age in ages)


ENOUGH_GROUPS = 20
"""Below so many, a share of groups says nothing."""
WAIT_COUNTER = re.compile("admission_wait_(.+)_seconds")
HELD_BACK = ("bound", "memory")
"""Reasons of a refused admission that say that sampling is ahead of training."""


def admission_waits(now: Snapshot, before: Snapshot | None) -> tuple[float, dict[str, float]]:
    """The workers' time since `before` in seconds, all together, and what of it they waited for admission, by reason.

    By each worker's own word in its heartbeats, over the time between them: the ledger's totals learn of a wait with
    the next submission, which may be minutes later. Workers that `before` does not know are left out.
    """
    watched, waited = 0.0, dict[str, float]()
    for worker, stats in now.workers.items():
        earlier = before.workers.get(worker) if before is not None else None
        if earlier is None:
            continue
        watched += max(0.0, _stat(stats, "heartbeat_ms") - _stat(earlier, "heartbeat_ms")) / 1000
        for name in stats:
            if reason := WAIT_COUNTER.fullmatch(name):
                waited[reason[1]] = waited.get(reason[1], 0.0) + _stat(stats, name) - _stat(earlier, name)
    return watched, waited


def admission_wait_share(now: Snapshot, before: Snapshot | None, reasons: Iterable[str]) -> float | None:
    """Share of the workers' time that they waited for admission for these reasons since `before`; None: not known."""
    watched, waited = admission_waits(now, before)
    return min(1.0, max(0.0, sum(waited.get(name, 0.0) for name in reasons) / watched)) if watched else None


def _stat(stats: Mapping[str, object], name: str) -> float:
    return number(stats, name) or 0.0


def filtered_share(records: Sequence[Mapping[str, object]]) -> float | None:
    """Share of the groups of these steps that have no gradient; None below ENOUGH_GROUPS."""
    groups = sum(number(record, "groups") or 0.0 for record in records)
    return (
        sum(number(record, "groups_filtered") or 0.0 for record in records) / groups
        if groups >= ENOUGH_GROUPS
        else None
    )


def dropped_share(now: Snapshot, before: Snapshot | None) -> float | None:
    """Share of the finished groups since `before` that workers dropped as their rewards were equal."""
    dropped, accepted = (_since(before, now, name) for name in ("groups_filtered_by_workers", "groups_accepted"))
    return dropped / (dropped + accepted) if dropped + accepted >= ENOUGH_GROUPS else None


def failed_share(now: Snapshot, before: Snapshot | None) -> float | None:
    """Share of the finished groups since `before` that failed at their workers; None below ENOUGH_GROUPS."""
    ends = ("groups_failed", "groups_filtered_by_workers", "groups_accepted")
    failed, *others = (_since(before, now, name) for name in ends)
    finished = failed + sum(others)
    return failed / finished if finished >= ENOUGH_GROUPS else None


@dataclass(frozen=True, slots=True)
class Unrewarded:
    """Samples that workers judged, and how many of them got no reward: it, or the episode, failed, and they were left
    out of their groups. newest: what the newest failure said, "" if there was none."""

    samples: int = 0
    failed: int = 0
    newest: str = ""

    @property
    def share(self) -> float:
        """Of the samples, how many got none."""
        return self.failed / self.samples if self.samples else 0.0


FAILURES = ("reward_failures", "episode_failures")
Workers = Mapping[str, Mapping[str, object]]


def unrewarded(workers: Workers, before: Workers | None = None) -> Unrewarded:
    """By the workers' own word in their heartbeats, since those of `before`, or since each began.

    The ledger's totals learn of a failure with the next submission only, so of none if every reward fails.
    """
    rewarded, failed, newest = 0.0, 0.0, ""
    for name, stats in sorted(workers.items(), key=lambda item: _stat(item[1], "heartbeat_ms")):
        earlier = (before or {}).get(name, {})
        rewarded += _grew(stats, earlier, "samples_rewarded")
        failed += sum(_grew(stats, earlier, count) for count in FAILURES)
        newest = next((str(stats[key]) for name in FAILURES if (key := f"{name}{NEWEST}") in stats), newest)
    return Unrewarded(round(rewarded + failed), round(failed), newest)


def _grew(stats: Mapping[str, object], earlier: Mapping[str, object], name: str) -> float:
    """What a worker's count grew by; one that was started again counts from 0."""
    value, was = _stat(stats, name), _stat(earlier, name)
    return value - was if value >= was else value


ENOUGH_SAMPLES = 20
"""Below so many, a share of samples says nothing."""


def unrewarded_share(now: Snapshot, before: Snapshot | None) -> float | None:
    """Share of the samples that got no reward since `before`, or, if these are too few, since the workers began."""
    lately = unrewarded(now.workers, before.workers if before is not None else None)
    known = lately if lately.samples >= ENOUGH_SAMPLES else unrewarded(now.workers)
    return known.share if known.samples >= ENOUGH_SAMPLES else None


def _since(before: Snapshot | None, now: Snapshot, name: str) -> float:
    """What a running total grew by; before None: all of it."""
    return now.counters.get(name, 0.0) - (before.counters.get(name, 0.0) if before is not None else 0.0)


def capacity(snapshot: Snapshot) -> int:
    """Groups that may be in flight: (max_lag + 1) x groups per step (docs/lag-bound.md)."""
    return (snapshot.max_lag + 1) * snapshot.groups_per_step


def in_flight(snapshot: Snapshot) -> int:
    """Groups that were started and neither trained nor dropped."""
    return snapshot.groups.generating + snapshot.groups.ready + snapshot.groups.leased
