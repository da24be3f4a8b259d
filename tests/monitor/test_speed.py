"""What an answer and a scrape cost with 10,000 groups in flight."""

from __future__ import annotations

import time

import httpx
import pytest

from services.monitor.app import create_app
from services.monitor.detail import SHOWN
from services.monitor.source import Source
from tests.monitor.conftest import Run

GROUPS, WORKERS, LAGS = 10_000, 16, 9
BUCKETS = 64  # of the time in queue: from nothing to four minutes
PATHS = ("/v1/staleness", "/v1/queue", "/v1/diagnosis", "/v1/events", "/v1/overview", "/metrics")


def put(run: Run, groups: int) -> None:
    """The indexes as so many more waiting groups leave them."""
    client, key = run.broker._connection.client, run.broker._keys.named
    now, begin = run.broker.server_time_ms(), client.zcard(key("waiting"))
    with client.pipeline(transaction=False) as pipe:
        pipe.zadd(key("waiting"), {str(i): now - i for i in range(begin, begin + groups)})
        pipe.zadd(key("ready"), {str(i): i % LAGS for i in range(begin, begin + groups)})
        pipe.hincrby(key("ledger"), "g_ready", groups)
        pipe.hincrby(key("ledger"), "g_issued", groups)
        pipe.execute()


@pytest.fixture
def full(run: Run) -> Run:
    """10,000 waiting groups of 16 workers at nine lags and after any time, 1000 events and as many steps."""
    put(run, GROUPS)
    client, key = run.broker._connection.client, run.broker._keys.named
    now = run.broker.server_time_ms()
    with client.pipeline(transaction=False) as pipe:
        for worker in range(WORKERS):
            pipe.hset(key("workers"), f"worker-{worker}", f'{{"heartbeat_ms": {now}, "groups": 3}}')
            name = f"worker:{{}}:worker-{worker}"
            mine = range(worker, GROUPS, WORKERS)
            pipe.zadd(key(f"waiting:worker:worker-{worker}"), {str(i): now - i for i in mine})
            pipe.hset(key("by_hist"), f"s:waiting:{name.format(0)}", sum(now - i for i in mine))
            for bucket in range(BUCKETS):
                pipe.hset(key("by_hist"), f"w:trained:{name.format(bucket)}", 1)
            for lag in range(LAGS):
                for what in ("waiting", "trained"):
                    pipe.hset(key("by_hist"), f"g:{what}:{name.format(lag)}", GROUPS // WORKERS // LAGS)
                    pipe.hset(key("by_hist"), f"t:{what}:{name.format(lag)}", 1000)
        for index in range(1000):
            pipe.lpush(key("events"), f'{{"time_ms": {now}, "kind": "engine", "text": "engine-{index} is serving"}}')
            pipe.lpush(key("metrics"), f'{{"step": {index + 1}, "reward_mean": 0.5, "wait_s": 0.1, "step_s": 1.0}}')
        pipe.hset(run.broker._keys.policy, "step", 1000)
        pipe.execute()
    return run


async def fastest(run: Run, path: str, tries: int) -> float:
    """Of so many answers, in seconds of the processor: what an answer needs, not what else the machine does."""
    transport = httpx.ASGITransport(create_app(Source(run.broker, fresh_s=0.0)))
    async with httpx.AsyncClient(transport=transport, base_url="http://monitor") as http:
        took = []
        for _ in range(tries):
            began = time.process_time()
            answer = await http.get(path)
            took.append(time.process_time() - began)
            assert answer.status_code == 200
    return min(took)


async def test_an_answer_costs_the_same_however_many_groups_wait(run: Run) -> None:
    put(run, 100)
    few = {path: await fastest(run, path, 10) for path in PATHS}
    put(run, GROUPS)
    assert run.broker.snapshot().groups.ready == GROUPS + 120
    for path in PATHS:
        assert await fastest(run, path, 10) < 3 * few[path], path


@pytest.mark.soak  # a figure in milliseconds says nothing on a machine that is slow or busy
@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_takes_at_most_20_ms(full: Run, path: str) -> None:
    assert await fastest(full, path, 30) < 0.020


@pytest.mark.soak
def test_a_scrape_costs_redis_less_than_five_milliseconds_of_its_time(full: Run) -> None:
    """Redis is single-threaded: a scrape delays training by what it takes, at most ten times a second."""
    client = full.broker._connection.client

    def used() -> float:
        facts = client.info("cpu")
        return float(facts["used_cpu_user_main_thread"]) + float(facts["used_cpu_sys_main_thread"])

    full.broker.snapshot(SHOWN, names=True)
    before = used()
    for _ in range(200):
        full.broker.snapshot(SHOWN, names=True)
    each = (used() - before) / 200
    assert each < 0.005, f"{1000 * each:.2f} ms"
