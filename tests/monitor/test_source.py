"""Looks that many share: of a Redis that is slow, away, or another one than before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from broker.errors import BrokerError, BrokerUnavailable
from broker.types import Snapshot
from services.monitor.source import Source
from tests.broker.helpers import wait_for
from tests.monitor.conftest import Run


class Slow:
    """Gives what it has, or raises it, after it is let go."""

    def __init__(self, answer: Snapshot | BrokerError) -> None:
        self.answer, self.asked, self.go = answer, 0, threading.Event()

    def snapshot(self, detail: int = 0, *, names: bool = False) -> Snapshot:
        self.asked += 1
        self.go.wait(60)
        if isinstance(self.answer, BrokerError):
            raise self.answer
        return self.answer

    def metrics_history(self, limit: int) -> list[dict[str, Any]]:
        return []


def crowd(redis: Slow) -> list[object]:
    """What seventeen get, snapshots or errors, that ask before the first read has ended, which takes ten seconds."""
    calls = []

    def clock() -> float:
        calls.append(1)
        return 10.0 if redis.go.is_set() else 0.0

    source = Source(redis, fresh_s=1.0, clock=clock)

    def ask(full: bool) -> object:
        try:
            return source.look(full).snapshot
        except BrokerError as error:
            return error

    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(ask, False)
        wait_for(lambda: redis.asked == 1)
        others = [pool.submit(ask, index % 2 == 0) for index in range(16)]
        wait_for(lambda: len(calls) == 18)  # each when it asks, and the first when its read begins
        redis.go.set()
        return [one.result(60) for one in (first, *others)]


def test_who_waits_for_a_slow_redis_shares_one_read_of_each_kind(run: Run) -> None:
    redis = Slow(run.broker.snapshot())
    assert crowd(redis) == [redis.answer] * 17
    assert redis.asked == 2


def test_who_waits_for_a_redis_that_is_away_shares_one_failure() -> None:
    redis = Slow(BrokerUnavailable("away"))
    assert all(isinstance(got, BrokerError) for got in crowd(redis))
    assert redis.asked == 1


def test_a_failure_is_not_shared_with_who_asks_later(run: Run) -> None:
    now = 0.0
    redis = Slow(BrokerUnavailable("away"))
    redis.go.set()
    source = Source(redis, fresh_s=0.1, clock=lambda: now)
    with pytest.raises(BrokerUnavailable):
        source.look()
    redis.answer, now = run.broker.snapshot(), 1.0
    assert source.look().snapshot is redis.answer


@pytest.mark.parametrize("lost", ["data", "clock"])
def test_shares_of_the_last_minute_begin_anew_when_redis_is_another_one(run: Run, lost: str) -> None:
    seen = run.broker.snapshot()
    redis = Slow(seen)
    redis.go.set()
    source = Source(redis, fresh_s=-1.0)
    source.look()
    redis.answer = replace(seen, time_ms=seen.time_ms + 5000)
    assert source.look().before is seen
    later = {
        "data": {"time_ms": seen.time_ms + 9000, "groups": replace(seen.groups, issued=0)},
        "clock": {"time_ms": 1},
    }
    redis.answer = replace(seen, **later[lost])  # type: ignore[arg-type]
    assert source.look().before is None


def test_the_earlier_look_is_of_no_moment_before_the_first_engine_served(run: Run) -> None:
    """What workers waited for while the engines started would hide what the bound holds them back for now."""
    serving = run.broker.snapshot()
    starting = replace(serving, engines=())
    redis, now = Slow(starting), 0.0
    redis.go.set()
    source = Source(redis, fresh_s=0.1, clock=lambda: now)
    befores = []
    for seconds, snapshot in enumerate((starting, starting, serving, serving, serving)):
        redis.answer, now = replace(snapshot, time_ms=serving.time_ms + 1000 * seconds), float(seconds)
        before = source.look().before
        befores.append((before.time_ms - serving.time_ms) // 1000 if before is not None else None)
    assert befores == [None, 0, None, 2, 2]
